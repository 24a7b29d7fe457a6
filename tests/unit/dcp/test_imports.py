import subprocess
import sys

PURE = (
    "archive",
    "boxes",
    "catalog",
    "checksums",
    "contents",
    "description",
    "dtypes",
    "index",
    "metadata",
    "pickled",
    "record",
    "source",
)


def test_what_reads_a_checkpoint_as_data_needs_no_torch():
    lines = [f"import orlop.dcp.{name}" for name in PURE]
    lines += ["import sys", "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
