"""As much of the WebDriver protocol as the report's test needs, on the standard library alone."""

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class WebDriverError(RuntimeError):
    """What the driver answered instead of a value."""


class Browser:
    """A headless Chromium with a fresh profile, driven through chromedriver."""

    def __init__(self, width=1440, height=1000):
        chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        driver = shutil.which("chromedriver")
        if not chromium or not driver:
            raise FileNotFoundError("chromium and chromedriver are needed (Debian: chromium, chromium-driver)")
        self.profile = tempfile.mkdtemp(prefix="report-test-")
        self.process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.session = None
        try:
            for line in self.process.stdout:
                if "started successfully on port" in line:
                    self.base = f"http://127.0.0.1:{line.rsplit('port', 1)[1].strip(' .' + chr(10))}"
                    break
            options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={self.profile}", f"--window-size={width},{height}"]}
            capabilities = {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            }
            self.session = self.call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})["sessionId"]
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        if self.session:
            try:
                self.call("DELETE", f"/session/{self.session}")
            except (WebDriverError, OSError):
                pass
        self.process.terminate()
        self.process.wait(timeout=20)
        self.process.stdout.close()
        shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=90) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            value = json.load(error)["value"]
            raise WebDriverError(f"{value['error']}: {value['message']}") from None

    def do(self, method, path, body=None):
        return self.call(method, f"/session/{self.session}{path}", body)

    def open(self, url):
        self.do("POST", "/url", {"url": url})

    def js(self, script, *args):
        return self.do("POST", "/execute/sync", {"script": script, "args": list(args)})

    def devtools(self, command, **params):
        return self.do("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def find(self, css):
        return self.do("POST", "/element", {"using": "css selector", "value": css})[ELEMENT]

    def click(self, css):
        self.do("POST", f"/element/{self.find(css)}/click", {})

    def type(self, css, text):
        self.do("POST", f"/element/{self.find(css)}/value", {"text": text})

    def clear(self, css):
        self.do("POST", f"/element/{self.find(css)}/clear", {})

    def keys(self, text):
        """Types into whatever has the focus."""
        actions = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self.do("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def point(self, css, x=0, y=0):
        """Moves the pointer to an offset from an element's centre."""
        move = {"type": "pointerMove", "duration": 0, "x": int(x), "y": int(y), "origin": {ELEMENT: self.find(css)}}
        self.do(
            "POST",
            "/actions",
            {"actions": [{"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}]},
        )

    def wait(self, script, *args, timeout=10):
        """Waits until the script returns something true, and gives it."""
        end = time.monotonic() + timeout
        while True:
            value = self.js(script, *args)
            if value:
                return value
            if time.monotonic() > end:
                raise TimeoutError(script)
            time.sleep(0.02)

    def log(self, kind):
        return self.do("POST", "/se/log", {"type": kind})

    def errors(self):
        """Console messages of level warning and above since the last call."""
        return [entry["message"] for entry in self.log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self):
        """Addresses that pages asked for since the last call."""
        urls = []
        for entry in self.log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                urls.append(message["params"]["request"]["url"])
        return urls

    def screenshot(self, path):
        with open(path, "wb") as out:
            out.write(base64.b64decode(self.do("GET", "/screenshot")))

    def full_screenshot(self, path):
        height = self.js("return document.documentElement.scrollHeight")
        width = self.js("return innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        with open(path, "wb") as out:
            out.write(base64.b64decode(shot["data"]))
