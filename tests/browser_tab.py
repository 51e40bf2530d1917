"""A tab of a browser on `perfmodel web`, and its server, for tests of the page."""

import os
import re
import subprocess
import sys
import tempfile


class WebServer:
    """`perfmodel web` in a process of its own."""

    def __init__(self, port=0):
        self.address, self._process = "", None
        self._cache = tempfile.TemporaryDirectory()
        self.start(port)

    def start(self, port=0):
        command = [sys.executable, "-m", "perfmodel", "web", "--port", str(port), "--no-open"]
        environment = {**os.environ, "XDG_CACHE_HOME": self._cache.name}  # plans are kept there
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        line = self._process.stdout.readline()
        found = re.search(r"http://[\d.]+:(\d+)", line)
        assert found, line + self._process.stdout.read()
        self.address, self.port = found[0], int(found[1])

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def close(self):
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.stdout.close()


class Tab:
    """A page of the browser, and what went wrong on it.

    errors:  of its console and of its requests; crashes: of its scripts, which nobody has caught
    addresses: that it has asked
    """

    def __init__(self, context, server):
        self.page, self.server = context.new_page(), server
        self.errors, self.crashes, self.addresses, self.dialogs = [], [], [], []
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.crashes.append(str(error)))
        self.page.on("requestfailed", lambda request: self._failed(request))
        self.page.on("request", lambda request: self.addresses.append(request.url))
        self.page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))

    def _failed(self, request):
        if request.failure != "net::ERR_ABORTED":  # superseded by the page itself
            self.errors.append(f"{request.url}: {request.failure}")

    def open(self, path):
        """Load a page, and wait until its answers are there."""
        response = self.page.goto(self.server.address + path)
        self.finalize()
        return response

    def finalize(self, timeout_s=180):
        """Wait until nothing is asked any more and each part has its answer."""
        self.page.evaluate("window.quietSince = null")
        self.page.wait_for_function(_SETTLED, timeout=1000 * timeout_s)

    @property
    def address(self):
        """Where the tab is now."""
        return self.page.evaluate("location.href")

    def figures(self):
        """(place, value, text) of each figure, as they stand there."""
        return [tuple(each) for each in self.page.evaluate(_FIGURES)]

    def move(self, key, share):
        """Move the slider of a field; `share` of its length."""
        self.page.evaluate(_MOVE, [key, share])

    def check(self):
        """Nothing went wrong, and nobody else was asked."""
        assert not self.errors, self.errors
        assert not self.crashes
        assert not self.dialogs
        elsewhere = [url for url in self.addresses if not url.startswith((self.server.address + "/", "blob:", "data:"))]
        assert not elsewhere


_FIGURES = """() => [...document.querySelectorAll("#answers :not(.stale) data.figure")]
  .filter(each => !each.closest(".stale")).map(each => [each.dataset.path, each.value, each.textContent])"""
_MOVE = """([key, share]) => {
  const field = [...document.querySelectorAll(`[name="${key}"]`)].at(-1);
  const range = document.querySelector(`input[type=range][data-for="${field.id}"]`);
  range.value = Math.round(1000 * share);
  range.dispatchEvent(new Event("input", { bubbles: true }));
  range.dispatchEvent(new Event("change", { bubbles: true }));
}"""
_SETTLED = """() => {
  const isQuiet = !document.querySelector(".htmx-request, .htmx-swapping, .waiting")
    && document.querySelector("#resolved")?.dataset.query === new URLSearchParams(location.search).toString();
  window.quietSince = isQuiet ? window.quietSince ?? performance.now() : null;
  return isQuiet && performance.now() - window.quietSince > 100;
}"""
