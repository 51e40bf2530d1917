"""What the machine does to a command: full disks, readers that leave, files of others, names that are paths."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.errors import SpecError
from perfmodel.files.atomic_write import atomic_write_all
from perfmodel.report.runs import RunFolder

SCENARIO = "llama-3.1-8b-a100"
FEW = ("--set", "traffic.num_requests=20")


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(app, [str(arg) for arg in args])


def _refused(result, wanted: str) -> None:
    assert result.exit_code == 2, result.output
    assert wanted in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.stderr


def _shell(line: str, tmp_path: Path, encoding: str = "utf-8") -> subprocess.CompletedProcess[str]:
    command = line.replace("perfmodel", f"{sys.executable} -m perfmodel", 1)
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        encoding=encoding,
        cwd=tmp_path,
        env=os.environ,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("command", ["simulate", "roofline"])
def test_an_empty_folder_is_not_this_one(run, tmp_path, command):
    """As of a variable that nobody set; `.` means this folder."""
    _refused(run(command, SCENARIO, *FEW, "--out", ""), "got an empty text; expected a path")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "line", [f"perfmodel memory {SCENARIO}", f"perfmodel memory {SCENARIO} --json", "perfmodel -h"]
)
def test_a_full_disk_under_the_answer_is_one_sentence(tmp_path, line):
    found = _shell(f"{line} > /dev/full", tmp_path)
    assert found.returncode == 2
    assert found.stderr == "error: the answer cannot be read or written: No space left on device.\n"


@pytest.mark.release
@pytest.mark.parametrize("encoding", ["ascii", "cp437", "cp1252"])
@pytest.mark.parametrize("command", ["hardware show a100-sxm-80gb", f"explain {SCENARIO}", "-h"])
def test_a_console_without_a_letter_shows_another(tmp_path, monkeypatch, encoding, command):
    """Windows gives a pipe its code page, which lacks a minus sign or a micro sign; a traceback is no answer."""
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    found = _shell(f"perfmodel {command} | cat", tmp_path, encoding)
    assert not found.stderr
    assert found.stdout


@pytest.mark.release
@pytest.mark.parametrize("flag", ["", "--json"])
def test_a_reader_that_leaves_is_no_error(tmp_path, flag):
    found = _shell(f"perfmodel hardware list {flag} | head -1", tmp_path)
    assert found.stdout.count("\n") == 1
    assert found.stderr == ""


def test_a_rerun_leaves_the_old_report_until_the_new_one_is_there(tmp_path):
    first = RunFolder(tmp_path / "out")
    assert first.work == first.path
    (first.work / "result.json").write_text('{"provenance": {}}')
    (first.work / "report.html").write_text("old")
    first.finish()
    second = RunFolder(tmp_path / "out")
    (second.work / "result.json").write_text('{"provenance": {}}')
    assert (tmp_path / "out" / "report.html").read_text() == "old"
    second.give_up()
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"result.json", "report.html"}
    third = RunFolder(tmp_path / "out")
    (third.work / "report.html").write_text("new")
    third.finish()
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"report.html"}
    assert (tmp_path / "out" / "report.html").read_text() == "new"


@pytest.mark.skipif(sys.platform == "win32", reason="limits of the shell")
def test_a_full_disk_under_a_rerun_leaves_the_old_report_as_it_was(run, tmp_path):
    assert run("simulate", SCENARIO, *FEW, "--out", "out").exit_code == 0
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    more = "--set traffic.num_requests=200 --out out"
    found = _shell(f"ulimit -f 16; perfmodel simulate {SCENARIO} {more}", tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("error: --out out: cannot be written: ")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def test_a_rerun_replaces_its_own_files_and_those_of_a_run_that_was_cut_short(run, tmp_path):
    for _ in range(2):
        assert run("simulate", SCENARIO, *FEW, "--out", "out").exit_code == 0
    whole = {file.name for file in (tmp_path / "out").iterdir()}
    for name in ("result.json", "report.html", "timeline.json"):
        (tmp_path / "out" / name).unlink()
    assert run("simulate", SCENARIO, *FEW, "--out", "out").exit_code == 0
    assert {file.name for file in (tmp_path / "out").iterdir()} == whole


@pytest.mark.parametrize("name", ["requests.csv", "report.html", "result.json"])
def test_a_file_that_no_run_has_written_stays(run, tmp_path, name):
    (tmp_path / name).write_text("mine")
    _refused(run("simulate", SCENARIO, *FEW, "--out", "."), f"has {name}, which no run of perfmodel has written")
    assert (tmp_path / name).read_text() == "mine"


def test_a_roofline_leaves_a_run_beside_it_alone(run, tmp_path):
    assert run("simulate", SCENARIO, *FEW, "--out", "out").exit_code == 0
    before = {file: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert run("roofline", SCENARIO, "--out", "out").exit_code == 0
    assert all(file.read_bytes() == content for file, content in before.items())


def test_a_roofline_is_no_pdf(run, tmp_path):
    _refused(run("roofline", SCENARIO, "--out", "x.pdf"), "--out x.pdf: expected an .html file, or a folder")
    assert not (tmp_path / "x.pdf").exists()


@pytest.mark.parametrize("name", ["../evil", "/evil", "..", "a\\b", "a\nb", "x" * 300])
def test_a_name_is_never_a_path(run, tmp_path, name):
    import yaml

    text = yaml.safe_load(Path(__file__).parents[3].joinpath(f"workloads/scenarios/{SCENARIO}.yaml").read_text())
    (tmp_path / "in" / "out").mkdir(parents=True)
    (tmp_path / "in" / "mine.yaml").write_text(yaml.safe_dump(text | {"name": name}))
    for command in ("roofline", "simulate"):
        _refused(run(command, "in/mine.yaml", "--out", "in/out"), "expected a name that a file can have")
    assert {path.name for path in tmp_path.rglob("*")} == {"in", "out", "mine.yaml"}


def test_nothing_half_stays_where_a_file_cannot_be_written(tmp_path):
    (tmp_path / "a").write_text("old")  # no folder for the second file
    with pytest.raises(SpecError, match="b: cannot be written"):
        atomic_write_all({tmp_path / "a": "new", tmp_path / "a" / "b": ""})
    assert (tmp_path / "a").read_text() == "old"
    assert {file.name for file in tmp_path.iterdir()} == {"a"}


def test_devices_and_networks_are_told_apart_by_what_their_files_say(run):
    folder = Path(__file__).parents[3] / "hardware_specs"
    for file in (folder / "h100-sxm-80gb.yaml", folder / "networks" / "ethernet-100.yaml"):
        found = run("hardware", "show", file)
        assert found.exit_code == 0, found.output
        assert file.stem in found.stdout


def test_a_range_without_an_end_is_its_own_mistake(run):
    found = run("whatif", SCENARIO, "--vary", "traffic.arrivals.rate=1..")
    _refused(found, "--vary traffic.arrivals.rate=1..: got 1..; expected both ends of a range")


def test_a_file_is_no_run_with_a_log_of_requests(run, tmp_path):
    (tmp_path / "a.md").write_text("")
    _refused(run("validate", "per-request", "a.md"), "a.md: got a file; expected the folder of a run")


@pytest.mark.release
@pytest.mark.skipif(sys.platform == "win32", reason="closes file descriptors in a shell")
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_ends_no_run(closed, tmp_path):
    """Its files are written; who still listens on stderr hears that nothing is printed."""
    done = _shell(f"perfmodel simulate {SCENARIO} {' '.join(FEW)} --out here {closed}", tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "here" / "result.json").is_file()
    if closed == ">&-":
        assert done.stderr.strip().splitlines()[0] == "stdout is closed: nothing is printed there."


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--nosuch", "No such option: --nosuch (see `perfmodel -h`"),
        ("simulat x", "No such command 'simulat'. Did you mean 'simulate'? (see `perfmodel -h`"),
        ("models lst", "No such command 'lst'. Did you mean 'list'? (see `perfmodel models -h`"),
        ("schema nosuch", "Invalid value for 'KIND': 'nosuch' is not one of 'scenario'"),
        ("compare a.json", "Missing argument 'B' (see `perfmodel compare -h`"),
        ("explain llama-3.1-8b-a100 --batch 0", "got 0; expected a number of at least 1 (see `perfmodel explain -h`"),
    ],
)
def test_a_wrong_flag_is_one_sentence(arguments, sentence):
    """It was a box of five lines below the usage, alone among all mistakes."""
    done = CliRunner().invoke(app, arguments.split())
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_plan_is_not_worked_out_for_a_folder_that_is_a_file(tmp_path, monkeypatch):
    """It was simulated for minutes first."""
    file = tmp_path / "plan.txt"
    file.write_text("kept", encoding="utf-8")
    monkeypatch.setattr("perfmodel.planning.search.make_plan", None)
    done = CliRunner().invoke(app, ["plan", SCENARIO, "--export", str(file)])
    assert done.exit_code == 2
    assert "is a file; expected a folder" in done.stderr
