import argparse
import subprocess
import sys
from collections.abc import Callable

import pytest

import userkv
from userkv import cli
from userkv.core.errors import InvalidSettingError


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"userkv {userkv.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["generate", "-", "--nonsense"], ["generate", "-", "--", "more"]])
def test_bad_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(argv)
    assert exit_info.value.code == 2
    assert "usage: userkv" in capsys.readouterr().err


def test_serve_passes_on_what_it_does_not_know() -> None:
    argv = ["serve", "--port", "0", "--block-size", "32", "--max-num-seqs=4", "--enforce-eager", "--", "--port", "9"]
    args = cli.parse(argv)
    assert args.port == 0
    assert args.passthrough == ["--block-size", "32", "--max-num-seqs=4", "--enforce-eager", "--port", "9"]


def test_serve_takes_no_abbreviations() -> None:
    # --max-user could be --max-users, but vLLM may have an option of that name one day.
    assert cli.parse(["serve", "--max-user", "3"]).passthrough == ["--max-user", "3"]


def _command(monkeypatch: pytest.MonkeyPatch, run: Callable[[argparse.Namespace], int]) -> None:
    monkeypatch.setattr(cli, "parse", lambda argv: argparse.Namespace(run=run))


def test_exit_code_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    _command(monkeypatch, lambda args: 7)
    assert cli.main([]) == 7


def test_own_errors_are_one_line_and_exit_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise InvalidSettingError("X=1 is wrong; set it to 2")

    _command(monkeypatch, run)
    assert cli.main([]) == 2
    assert capsys.readouterr().err == "userkv: X=1 is wrong; set it to 2\n"


def test_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    _command(monkeypatch, run)
    assert cli.main([]) == 130
    assert capsys.readouterr().err == ""


def test_reader_that_goes_away_is_no_traceback() -> None:
    command = f"{sys.executable} -m userkv.cli generate - --requests 3000 | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


def test_building_the_parser_imports_nothing_heavy() -> None:
    code = (
        "import sys, userkv.cli as c; c.build_parser(); print({'numpy', 'torch', 'vllm', 'aiohttp'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
