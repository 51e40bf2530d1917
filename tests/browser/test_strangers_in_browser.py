"""What strangers do to the page: files, other pages, names of others; and a server that ends."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser_tab import Tab, WebServer

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")

CONFIG = Path(__file__).parents[1] / "data" / "web_config.json"
HOSTILE = "<img src=x onerror=alert(1)>"


def dropped(tab, name, content):
    """Drop a file on the page as a hand does; returns what the page says."""
    tab.page.evaluate(
        """([name, content]) => {
          document.querySelector("#status").textContent = "";
          const data = new DataTransfer();
          data.items.add(new File([content], name));
          for (const kind of ["dragenter", "dragover", "drop"])
            document.querySelector("#drop").dispatchEvent(new DragEvent(kind, { dataTransfer: data, bubbles: true }));
        }""",
        [name, content],
    )
    return said(tab)


def said(tab):
    tab.page.wait_for_function("() => !/^(Reading.*)?$/.test(document.querySelector('#status').textContent)")
    return tab.page.inner_text("#status")


@pytest.mark.release
def test_files_that_strangers_drop(tab, tmp_path):
    tab.open("/memory?model=qwen3-0.6b&hardware=h100")
    first = tab.figures()
    assert "got .exe; expected .json" in dropped(tab, "virus.exe", "MZ")
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(100_000_000)
    tab.page.evaluate("document.querySelector('#status').textContent = ''")
    tab.page.set_input_files("#file", large)
    assert "100,000,000 bytes; expected at most 64,000,000" in said(tab)
    assert tab.figures() == first  # what was refused has changed nothing
    refused = [error for error in tab.errors if "422" in error]
    assert len(refused) == len(tab.errors) == 2
    tab.errors.clear()

    assert "is the model now" in dropped(tab, "half.gguf", "GGUF\x03\0\0\0")
    tab.finalize()
    assert "half.gguf" in tab.page.inner_text(".refusal")
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    content = json.dumps(config | {"_name_or_path": HOSTILE, "name": HOSTILE})
    assert "is the model now" in dropped(tab, f"{HOSTILE}config.json", content)
    tab.finalize()
    assert tab.figures()
    assert tab.figures() != first
    assert "drop%3A" in tab.address
    address = tab.address
    tab.page.reload()
    tab.finalize()
    assert tab.address == address
    assert tab.figures()
    assert not tab.page.query_selector("img[onerror], #main img")
    tab.check()


@pytest.fixture
def elsewhere(server):
    """The address of another site's page, with a form that posts to the server as soon as it loads."""
    html = f"""<!doctype html><form method="post" enctype="text/plain" action="{server.address}/drop?name=a.json">
      <input name='{{"x":"' value='"}}'></form>
      <script>fetch("{server.address}/line", {{ method: "POST", mode: "no-cors", body: "vllm serve x" }})
        .catch(() => 0).finally(() => document.forms[0].submit());</script>"""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(html.encode() if "quiet" not in self.path else b"<!doctype html>")

        def log_message(self, *_):
            pass

    other = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{other.server_port}/"
    other.shutdown()
    other.server_close()


@pytest.mark.release
def test_a_page_of_another_site_changes_nothing_and_reads_nothing(tab, elsewhere):
    answers = []
    tab.page.on("response", lambda response: answers.append((response.request.method, response.status)))
    with tab.page.expect_navigation(url="**/drop**"):
        tab.page.goto(elsewhere)
    tab.page.wait_for_load_state()
    assert {status for method, status in answers if method == "POST"} == {403}
    assert "another page" in tab.page.inner_text("body")
    tab.page.goto(elsewhere.replace("127.0.0.1", "localhost") + "?quiet")
    read = tab.page.evaluate(
        """async address => { try { return await (await fetch(address)).text(); } catch { return "no"; } }""",
        f"{tab.server.address}/deployment",
    )
    assert read == "no"  # the token stays with the page's own


@pytest.mark.release
def test_a_name_that_was_bound_to_this_machine_is_not_the_page_s(tab):
    response = tab.page.goto(f"http://evil.example:{tab.server.port}/deployment")
    assert response.status == 400
    assert "perfmodel-token" not in tab.page.content()


@pytest.mark.release
def test_a_server_that_ends_and_starts_again(tab, browser):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = WebServer(port)
    try:
        mine = Tab(tab.page.context, own)
        mine.open("/memory?hardware=h100")
        own.kill()
        mine.move("engine.max_num_seqs", 0.9)
        mine.page.wait_for_selector(".of-page >> text=The server does not answer")
        assert mine.figures()  # what was known stays
        own.start(port)
        mine.page.wait_for_selector(".of-page >> text=The server does not answer", state="detached")
        mine.finalize()
        assert "max_num_seqs" in mine.address
        assert mine.figures()
        answer = dropped(mine, "config.json", CONFIG.read_text(encoding="utf-8"))  # with the new server's token
        assert "is the model now" in answer
        mine.finalize()
        assert not mine.crashes  # its console says that nobody answers
    finally:
        own.close()
