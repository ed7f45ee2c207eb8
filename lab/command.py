"""What `python bench.py` and `python breakit.py` do with their arguments."""

import sys
from collections.abc import Callable
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from training import config


def command(name: str, schema: type, run: Callable[[Any], None]) -> None:
    """Calls run() with the keys that were typed, an instance of schema. Exits with 1 and one line for a mistake of the
    user's (ValueError, OSError). name: of the script and of its file in conf/."""

    @hydra.main(version_base="1.3", config_path=str(config.CONF), config_name=name)
    def main(typed: DictConfig) -> None:
        try:
            run(OmegaConf.to_object(typed))
        except (ValueError, OSError) as error:  # a program error keeps its traceback
            sys.exit(f"{name}: {error}")

    config.check_arguments(sys.argv[1:], schema, name)
    sys.argv[1:] = map(config.quoted, sys.argv[1:])
    main()
