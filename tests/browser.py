"""A headless Chromium, driven through its own driver's HTTP: no library, and nothing to install where both are."""

import json
import shutil
import subprocess
import urllib.error
import urllib.request
from contextlib import contextmanager

from tests.processes import HANGS

BROWSER = next(
    (path for name in ("chromium", "google-chrome", "chromium-browser") if (path := shutil.which(name))), None
)
DRIVER = shutil.which("chromedriver")
MISSING = "" if BROWSER and DRIVER else "no Chromium and its driver here: apt-get install chromium chromium-driver"


class Browser:
    """One page. Paths and commands are those of https://www.w3.org/TR/webdriver/."""

    def __init__(self, port: int):
        self.root = f"http://127.0.0.1:{port}"
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options = {"binary": BROWSER, "args": flags}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        wanted["timeouts"] = {"script": 1000 * HANGS, "pageLoad": 1000 * HANGS}
        session = self.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        self.root += f"/session/{session}"

    def call(self, method: str, path: str, body: dict | None = None):
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.root + path, data, headers, method=method)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=HANGS) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.loads(error.read())["value"]["message"]) from error

    def open(self, url: str) -> None:
        self.call("POST", "/url", {"url": "about:blank"})  # or a new hash would be the old page's
        self.call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments):
        return self.call("POST", "/execute/sync", {"script": script, "args": arguments})

    def window(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": min(width, height) < 600}
        self.call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics})

    def log(self, kind: str) -> list[dict]:
        return self.call("POST", "/se/log", {"type": kind})


@contextmanager
def browser():
    command = [DRIVER, "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        try:
            said = next(line for line in driver.stdout if "successfully on port" in line)
            page = Browser(int(said.split("port ")[1].rstrip(".\n")))
            yield page
            page.call("DELETE", "")
        finally:
            driver.terminate()
