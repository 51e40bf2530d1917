"""A real Prometheus that scrapes servers, and a real haproxy in front of two: on loopback, and ended by their pid."""

__all__ = ["linted", "prometheus", "proxied", "queried", "rules_of"]

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from server import ended, free_port

_START_S = 30.0


@contextmanager
def _running(words: Sequence[str], log: Path, ready: str) -> Iterator[None]:
    """The program of `words`, from when `ready` answers with 200 until the block ends."""
    with log.open("w") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, text=True)
    try:
        end = time.monotonic() + _START_S
        while not _answers(ready):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{words[0]} does not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield
    finally:
        ended(process)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as page:
            return bool(page.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _program(name: str, package: str) -> str:
    which = shutil.which(name, path="/usr/local/bin:/usr/bin:/usr/sbin:/bin")
    if which is None:
        raise RuntimeError(f"{name} is not there: apt-get install {package}")
    return which


@contextmanager
def prometheus(urls: Sequence[str], out: Path, rules: Path) -> Iterator[str]:
    """The address of a Prometheus that scrapes `urls` every second and evaluates `rules`."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules.resolve())],
        "scrape_configs": [
            {"job_name": "emulator", "static_configs": [{"targets": [urlsplit(url).netloc for url in urls]}]}
        ],
    }
    (out / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    words = [
        _program("prometheus", "prometheus"),
        f"--config.file={out / 'prometheus.yml'}",
        f"--storage.tsdb.path={out / 'tsdb'}",
        f"--web.listen-address={address}",
    ]
    with _running(words, out / "prometheus.log", f"http://{address}/-/ready"):
        end = time.monotonic() + _START_S
        while not any(
            row["value"][1] == "1" for row in queried(f"http://{address}", "up")
        ):  # it looks about at leisure
            if time.monotonic() > end:
                raise RuntimeError(f"prometheus does not scrape {', '.join(urls)}")
            time.sleep(0.5)
        yield f"http://{address}"


def queried(address: str, expression: str) -> list[dict[str, Any]]:
    """What Prometheus at `address` answers to a query, now. Raises RuntimeError with its words if it refuses."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"{address}/api/v1/query?{query}", timeout=10) as page:
            result: list[dict[str, Any]] = json.load(page)["data"]["result"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{expression}: {error.read().decode()}") from None
    return result


def rules_of(address: str) -> list[dict[str, Any]]:
    """The rules of Prometheus at `address`, with their health."""
    with urllib.request.urlopen(f"{address}/api/v1/rules", timeout=10) as page:
        return [rule for group in json.load(page)["data"]["groups"] for rule in group["rules"]]


def linted(url: str) -> tuple[int, list[str]]:
    """Status and remarks of `promtool check metrics` on the server's page."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
        text = page.read().decode()
    words = [_program("promtool", "prometheus"), "check", "metrics"]
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr).splitlines()


@contextmanager
def proxied(urls: Sequence[str], out: Path) -> Iterator[str]:
    """The address of a haproxy that gives each request to the server of `urls` with the fewest open ones."""
    address = f"127.0.0.1:{free_port()}"
    servers = [f"    server replica{n} {urlsplit(url).netloc} check inter 500ms fall 2" for n, url in enumerate(urls)]
    lines = [
        *("global", "    maxconn 2000", "defaults", "    mode http", "    timeout connect 5s"),
        *("    timeout client 300s", "    timeout server 300s"),
        *("frontend entrance", f"    bind {address}", "    default_backend replicas"),
        *("backend replicas", "    balance leastconn", "    option httpchk GET /health"),
        *(
            "    option http-buffer-request",
            "    option redispatch 1",
            "    retry-on conn-failure empty-response 503",
            *servers,
        ),
    ]
    (out / "haproxy.cfg").write_text("\n".join([*lines, ""]), encoding="utf-8")
    words = [_program("haproxy", "haproxy"), "-db", "-f", str(out / "haproxy.cfg")]
    with _running(words, out / "haproxy.log", f"http://{address}/health"):
        yield f"http://{address}"
