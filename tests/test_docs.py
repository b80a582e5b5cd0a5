"""Documents: links lead somewhere, named files are there, no room, result or test is left out."""

import fnmatch
import json
import re
import subprocess

import pytest
from ranks import ROOT

README, MEASUREMENTS = ROOT / "README.md", ROOT / "docs" / "measurements.md"
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "topologies/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "tests").glob("**/README.md")),
]
FOLDERS = ".ci", "benchmarks", "cuda", "docs", "fp4comm", "tests", "topologies"

every_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT))
)


def prose(document):
    """A document without its blocks of code."""
    return re.sub(r"^```.*?^```", "", document.read_text(), flags=re.S | re.M)


def links(document):
    return re.findall(r"\]\(([^)\s]+)\)", prose(document))


def code(text):
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", text)


def anchors(document):
    """Where a link into the document may lead: its headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", prose(document), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_document
def test_links_lead_somewhere(document):
    for link in links(document):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@every_document
def test_files_that_are_named_are_there(document):
    """Paths from the top of the checkout, and results by their names alone."""
    for name in code(prose(document)):
        if re.fullmatch(r"[\w.*/-]+", name) and name.split("/")[0] in FOLDERS and "/" in name:
            assert list(ROOT.glob(name.rstrip("/"))), name
        elif re.fullmatch(r"[\w*-]+\.(json|png)", name) and document in (README, MEASUREMENTS):
            assert list(RESULTS.glob(name)), name


def test_measurements_say_where_each_result_is_from():
    """In the second column of its table; a picture by the result that it is drawn from."""
    table = MEASUREMENTS.read_text().split("\n| section | result files |\n")[1].split("\n\n")[0]
    named = code("\n".join(line.split(" | ")[1] for line in table.splitlines()[1:]))
    for file in RESULTS.iterdir():
        assert any(fnmatch.fnmatch(f"{file.stem}.json", name) for name in named), file.name


def test_the_list_of_tests_names_each_file():
    named = code((ROOT / "tests" / "README.md").read_text())
    for file in (ROOT / "tests").glob("test_*.py"):
        assert any(fnmatch.fnmatch(file.name, pattern) for pattern in named), file.name


def rooms(head):
    """Rows of the README's table of rooms that has this head: names, and what is in them."""
    table = (
        README.read_text().split(f"\n| {head} | what is in it |\n|---|---|\n")[1].split("\n\n")[0]
    )
    rows = [line.strip("| ").split(" | ", 1) for line in table.splitlines()]
    return [(code(names), text) for names, text in rows]


def tracked(folder=""):
    """What git has in a folder; folders among it end in a slash."""
    command = ["git", "ls-files", "--", f"./{folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("needs the checkout")
    below = [line.removeprefix(folder) for line in done.stdout.splitlines()]
    return {name.split("/")[0] + "/" * ("/" in name) for name in below}


@pytest.mark.parametrize(
    ("head", "folder"), [("beside the package", ""), ("in `fp4comm/`", "fp4comm/")]
)
def test_the_readme_has_each_room_once(head, folder):
    named = [name for names, _ in rooms(head) for name in names]
    others = {"README.md", ".gitignore", "fp4comm/"} if folder == "" else set()
    assert sorted(named) == sorted(tracked(folder) - others)


def test_the_readme_has_each_module_in_its_room():
    for names, text in rooms("in `fp4comm/`"):
        for room in names:
            if room.endswith("/"):
                modules = {name for name in tracked(f"fp4comm/{room}") if not name.startswith("_")}
                assert modules <= set(code(text)), room


def test_the_readme_shows_rows_of_a_result():
    text = README.read_text()
    name = "dispatch_h200_8_ranks.json"
    assert f"`{name}`" in text
    printed = re.search(r"```\n(#  *op .*?)```", text, re.S)[1].splitlines()
    result = json.loads((RESULTS / name).read_text())
    assert len(printed) == 2 + len(result["rows"])
    for line, row in zip(printed[2:], result["rows"], strict=True):
        time = row["time"]
        want = (
            [row["op"], row["format"], row["route"], row["tokens"]]
            + [row["wire_rows"]["sent"], row["wire_bytes"]["sent"]]
            + [row["between_bytes"], row["inside_bytes"], row["bf16_bytes"]]
            + [f"{time[name]:.1f}" for name in ("median_us", "p90_us")]
            + [f"{row[name]:.3f}" for name in ("algbw_gbs", "busbw_gbs")]
            + [f"{row[name]:.2f}" if row[name] else "-" for name in ("vs_bf16", "vs_plain")]
            + [row["num_wrong"]]
        )
        assert line.split() == [str(value) for value in want]
