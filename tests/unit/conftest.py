"""The command line, called as its entry point is."""

import signal
import sys

import pytest

import orlop.cli


@pytest.fixture
def call(monkeypatch, capsys):
    """The command in this process: (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["orlop", *map(str, arguments)])
        before = signal.getsignal(signal.SIGTERM)
        try:
            with pytest.raises(SystemExit) as ended:
                orlop.cli.main()
        finally:
            signal.signal(signal.SIGTERM, before)
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run
