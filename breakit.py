"""Takes lines out of attention, one at a time, and shows what each is for.

    python breakit.py                                            every failure: predicted and found
    python breakit.py failure=no_max trainings=true              one, with two short trainings, whole and broken
    python breakit.py trainings=true out=docs                    docs/break-it.md, and its pictures in docs/break
    python breakit.py trace=true                                 a row of attention, tile by tile
    python breakit.py trace=true failure=no_rescale              the same without the rescaling
    python breakit.py trace=true run=latest layer=3 head=1       a row of your own model's head
    python breakit.py look=true run=latest 'prompt="def f(x):"'  what each head of your model reads, as a page
    python breakit.py replay=runs/NAME/faults/step_000123        the batch again that ended a run with NaN
    python breakit.py --help                                     every key

docs/explorer.html shows attention and its failures tile by tile, in a browser; it needs no command.
"""

import os
import sys
from typing import cast

import hydra
from omegaconf import DictConfig, OmegaConf

from lab.modes import Lab, run
from training import config

config.register(Lab, "breakit_schema")


@hydra.main(version_base="1.3", config_path="conf", config_name="breakit")
def main(typed: DictConfig) -> None:
    """Exits with 1 for a mistake of the user's, in one line."""
    try:
        run(cast(Lab, OmegaConf.to_object(typed)))
    except (ValueError, OSError) as error:  # a program error keeps its traceback
        if os.environ.get("HYDRA_FULL_ERROR"):
            raise
        print(f"breakit: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    config.refuse_unknown(sys.argv[1:], Lab, "breakit")
    main()
