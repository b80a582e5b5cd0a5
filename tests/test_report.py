"""fp4comm report: every row and number of the files, nothing from outside, clear refusals."""

import html.parser
import json
import re
import xml.etree.ElementTree
from pathlib import Path

import pytest
from command_line import passed, run
from PIL import Image

from fp4comm.report import charts, compare, page, results

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NAMES = ("decode_h200_8_ranks", "dispatch_h200_8_ranks", "dispatch_h200_2_nodes")
H200 = [RESULTS / f"{name}.json" for name in NAMES]
DEMO = RESULTS / "demo_4_ranks.json"
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(html.parser.HTMLParser):
    """Elements must close in order; collects what a test asks about."""

    def __init__(self, file):
        super().__init__(convert_charrefs=True)
        self.text, self.open, self.ids, self.attributes = file.read_text(), [], [], []
        self.cells, self.numbers, self.labelled = [], [], []
        self.feed(self.text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.attributes += attrs.items()
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.labelled += [attrs["aria-labelledby"]] if tag == "svg" else []
        self.numbers += [attrs["value"]] if tag == "data" else []
        if tag not in VOID:
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        if "td" in self.open:
            self.cells[-1] += data


def leaves(value):
    """Texts and numbers of a row, as JSON writes them; without those that are not there."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value if isinstance(value, str) else json.dumps(value)]


def medians(content):
    return [row["time"]["median_us"] for row in content["rows"]]


@pytest.fixture(scope="module")
def bench_file(tmp_path_factory):
    """A bench of this machine, measured now."""
    file = tmp_path_factory.mktemp("bench") / "bench.json"
    sizes = ["--tokens", 32, "--hidden", 128, "--experts", 8, "--topk", 2]
    passed("bench", *sizes, "--warmup", 1, "--iterations", 3, "--ranks", 2, "--json", file)
    return file


# What it shows


def test_every_row_and_number_is_on_the_page_and_in_the_json(tmp_path, bench_file):
    files = [H200[1], DEMO, bench_file]
    told = passed("report", *files, "--html", tmp_path / "o.html", "--json", tmp_path / "o.json")
    found = Page(tmp_path / "o.html")
    cells, numbers = set(found.cells), set(found.numbers)
    for file in files:
        content = json.loads(file.read_text())
        missing = [leaf for leaf in leaves(content["rows"]) if leaf not in cells]
        assert missing == [], file.name
        assert {repr(us) for us in medians(content)} <= numbers
        assert f"{file.stem}: " in told
        assert content["machine"]["cpu"] in cells or content["machine"]["cuda_devices"][0] in cells
        assert content["git"]["commit"][:10] in "".join(found.cells)
    written = json.loads((tmp_path / "o.json").read_text())
    assert [r["name"] for r in written["results"]] == [file.stem for file in files]
    for file, result in zip(files, written["results"], strict=True):
        for row, of_file in zip(result["rows"], json.loads(file.read_text())["rows"], strict=True):
            assert row | of_file == row  # speed-ups too, which are computed again


def test_the_page_needs_nothing_else_and_its_pictures_have_texts(tmp_path):
    passed("report", *H200[1:], "--html", tmp_path / "o.html")
    found = Page(tmp_path / "o.html")
    assert "http" not in found.text
    assert "url(" not in re.sub(r"url\(#", "", found.text)
    assert "<script" not in found.text
    links = [value for name, value in found.attributes if name in ("src", "href", "xlink:href")]
    assert all(value.startswith("#") for value in links)
    assert len(found.ids) == len(set(found.ids))
    assert {value[1:] for value in links} <= set(found.ids)
    assert found.labelled
    assert set(found.labelled) <= set(found.ids)
    assert "prefers-color-scheme: dark" in found.text
    svgs = re.findall(r"<svg.*?</svg>", found.text, re.S)
    for svg in svgs:
        xml.etree.ElementTree.fromstring(svg)
    # Every colour follows the page, so that none is lost on the other background.
    assert set(re.findall(r"#[0-9a-f]{6}\b", "".join(svgs))) == set()


def test_names_are_texts_not_markup(tmp_path):
    file = tmp_path / "a<b>&$x$_{.json"
    file.write_text(DEMO.read_text())
    passed("report", file, "--html", tmp_path / "o.html", "--png", tmp_path / "o.png")
    assert "<b>" not in (tmp_path / "o.html").read_text()
    assert "a&lt;b&gt;&amp;$x$_{" in (tmp_path / "o.html").read_text()


def test_the_picture_opens_and_says_what_it_shows(tmp_path):
    passed("report", H200[1], "--png", tmp_path / "o.png")
    with Image.open(tmp_path / "o.png") as picture:
        picture.load()
        assert picture.width > 1000
        assert len(picture.getcolors(1 << 24)) > 8
        (row,) = (r for r in json.loads(H200[1].read_text())["rows"] if r["format"] == "mxfp4")
        text = f"dispatch mxfp4: {row['time']['median_us'] / 1e3:.2f} ms"
        assert text in picture.info["Description"]


def test_the_readme_shows_what_its_command_makes(tmp_path):
    (line,) = re.findall(
        r"^fp4comm report (benchmarks/\S+) --html report.html --png (report.png)$",
        (ROOT / "README.md").read_text(),
        re.M,
    )
    passed("report", *sorted(ROOT.glob(line[0])), "--png", tmp_path / "o.png")
    with Image.open(tmp_path / "o.png") as made, Image.open(ROOT / "docs" / line[1]) as landed:
        charts_of = [set(p.info["Description"].splitlines()) for p in (made, landed)]
    assert charts_of[1] <= charts_of[0]  # results that came later may be missing


def luminance(colour):
    """WCAG 2.1, relative luminance."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_stand_out_from_their_page(theme):
    paper = luminance(charts.COLOURS["paper"][theme])
    for name, pair in charts.COLOURS.items():
        darker, lighter = sorted((paper, luminance(pair[theme])))
        contrast = (lighter + 0.05) / (darker + 0.05)
        least = {"paper": 1, "line": 1, "ink": 7, "green": 4.5, "pink": 4.5}.get(name, 3)
        assert contrast >= least, name
    assert len(set(charts.LIGHT.values())) == len(charts.COLOURS)


# Together


def changed(file, to, **changes):
    content = json.loads(file.read_text())
    content["arguments"].update(changes.pop("arguments", {}))
    to.write_text(json.dumps({**content, **changes}))
    return to


def test_series_are_results_that_differ_in_one_number_alone(tmp_path):
    read, _ = results.read(H200)
    (tokens,) = compare.series(read, "tokens")
    assert tokens.positions == [1, 8, 32, 128, 4096]  # not the one on two nodes
    assert compare.series(read, "skew") == []
    skewed = changed(H200[1], tmp_path / "skewed.json", arguments={"skew": "1.5"})
    read, _ = results.read([skewed, H200[1]])
    (skew,) = compare.series(read, "skew")
    assert skew.positions == [0, 1.5]
    assert compare.series(read, "tokens") == []
    assert "Speed-up over skew, measured" in {
        chart.title.split(":")[0] for chart in charts.charts(read, [])
    }


def test_a_file_of_several_cases_is_as_many_results(tmp_path, bench_file):
    one = json.loads(bench_file.read_text())
    other = {**one, "tokens": [64, 64], "arguments": {**one["arguments"], "skew": "1"}}
    (tmp_path / "sweep.json").write_text(json.dumps([one, other]))
    (tmp_path / "alone.json").write_text(json.dumps([one]))
    files = [tmp_path / "sweep.json", tmp_path / "sweep.json", tmp_path / "alone.json", bench_file]
    read, _ = results.read(files)
    names = ["sweep (tokens 32, skew 0)", "sweep (tokens 64, skew 1)"]
    again = [f"{name} (2)" for name in names]
    assert [result.name for result in read] == [*names, *again, "alone", "bench"]
    assert [result.setup.tokens for result in read[:2]] == [32, 64]
    passed("report", *files, "--json", tmp_path / "o.json")


def test_rows_of_a_round_trip_and_an_overlap_are_shown(tmp_path):
    file = tmp_path / "also.json"
    sizes = ["--tokens", "4,1", "--hidden", 64, "--experts", 4, "--topk", 2, "--wire", "bf16,mxfp4"]
    also = ["--also", "round_trip", "--warmup", 1, "--iterations", 1]
    passed("bench", *sizes, *also, "--json", file)
    cases = json.loads(file.read_text())
    for case in cases:  # as a run on GPUs adds it
        for dispatch in [row for row in case["rows"] if row["op"] == "dispatch"]:
            beside = {"size": 1264, "repeats": 3, "hidden_share": 0.875}
            alone = {"dispatch": 4.5, "product": 5.25}
            overlap = {"op": "overlap", "vs_bf16": None, "vs_plain": None, "parts_us": alone}
            case["rows"].append(dispatch | overlap | {"beside": beside})
    file.write_text(json.dumps(cases))
    told = passed("report", file, "--html", tmp_path / "o.html")
    assert "also (tokens 4): " in told
    first = json.loads(file.read_text())[0]["rows"]
    cells = set(Page(tmp_path / "o.html").cells)
    assert [leaf for leaf in leaves(first) if leaf not in cells] == []
    assert "round_trip mxfp4" in cells
    read, _ = results.read([file])
    ratios = {row.op: read[0].vs_bf16(row) for row in read[0].rows if row.dispatch == "mxfp4"}
    assert ratios["round_trip"] > 0
    assert ratios["overlap"] is None


def test_a_plan_of_the_same_setup_is_compared_and_another_is_not(tmp_path, bench_file):
    same = ["--topology", "cpu-1g", "--ranks-per-node", 2, "--nodes", 1, "--hidden", 128]
    same += ["--experts", 8, "--topk", 2]
    plan, other = tmp_path / "plan.json", tmp_path / "other.json"
    setup = json.loads(bench_file.read_text())
    topology = (ROOT / "topologies" / "cpu-1g.toml").read_text()
    ranks = re.sub(r"(?m)^ranks = .*", 'ranks = { value = 2, source = "test" }', topology)
    (tmp_path / "two.toml").write_text(ranks.replace("codec/", f"{ROOT}/topologies/codec/"))
    same[1] = tmp_path / "two.toml"
    passed("plan", *same, "--tokens", 32, "--json", plan)
    passed("plan", *same, "--tokens", 64, "--json", other)
    passed("report", bench_file, plan, other, "--json", tmp_path / "o.json")
    written = json.loads((tmp_path / "o.json").read_text())
    (one,) = written["comparisons"]
    assert (one["measured"], one["predicted"]) == ("bench", "plan")
    predicted = {(r["op"], r["format"]): r["us"] for r in json.loads(plan.read_text())["rows"]}
    for row, of_file in zip(one["rows"], setup["rows"], strict=True):
        assert row["measured_us"] == of_file["time"]["median_us"]
        assert row["predicted_us"] == predicted[of_file["op"], of_file["format"]]
        assert row["error"] == row["predicted_us"] / row["measured_us"] - 1
    assert "other does not predict bench: tokens 32, not 64." in written["not_measured"]

    by_topology = tmp_path / "by_topology.json"
    passed("report", bench_file, tmp_path / "two.toml", "--json", by_topology)
    (same_again,) = json.loads(by_topology.read_text())["comparisons"]
    assert same_again["rows"] == one["rows"]


def test_nodes_of_the_two_hop_route_are_virtual_on_one_host(tmp_path):
    file = tmp_path / "two_hop.json"
    sizes = ["--tokens", 16, "--hidden", 64, "--experts", 4, "--topk", 2, "--wire", "bf16,mxfp4"]
    nodes = ["--ranks", 4, "--ranks-per-node", 2, "--route", "flat,two_hop"]
    passed("bench", *sizes, *nodes, "--warmup", 1, "--iterations", 1, "--json", file)
    told = passed("report", file, "--html", tmp_path / "o.html")
    assert "4 ranks on 2 nodes" in told
    assert "dispatch mxfp4, two_hop: " in told
    assert "2 virtual nodes of one host" in told
    assert "the two-hop route was not measured" not in told
    between = {str(row["between_bytes"]) for row in json.loads(file.read_text())["rows"]}
    assert between <= set(Page(tmp_path / "o.html").numbers)


def test_a_topology_of_another_device_predicts_nothing():
    told = passed("report", DEMO, ROOT / "topologies" / "hgx-h100-400g.toml")
    assert "hgx-h100-400g.toml does not predict demo_4_ranks: device: expected cuda" in told


def test_it_says_what_was_not_measured(tmp_path, bench_file):
    alone = changed(bench_file, tmp_path / "alone.json", ranks=1, git=None)
    other = changed(H200[1], tmp_path / "other.json", git={"commit": "0123abc", "dirty": None})
    told = passed("report", *H200, other, alone, "--html", tmp_path / "o.html")
    for text in (
        "wire formats not measured: mxfp8",
        "2 virtual nodes of one host: what is between them is no real network",
        "8 ranks shared 1 GPU",
        "rows of 144 of 32,768 tokens were compared",
        "alone: one rank: nothing left it",
        "alone: the commit is unknown",
        "are of different commits",
        "no two results differ in skew alone",
        "no plan or topology here fits",
    ):
        assert text in told
        assert text in (tmp_path / "o.html").read_text()
    assert "Bandwidth: alone" not in (tmp_path / "o.html").read_text()


def test_wrong_rows_are_not_hidden(tmp_path):
    content = json.loads(DEMO.read_text())
    content["rows"][0]["num_wrong"] = 3
    (tmp_path / "wrong.json").write_text(json.dumps(content))
    told = passed("report", tmp_path / "wrong.json", "--html", tmp_path / "o.html")
    assert "wrong rows: 3 FAILED" in told
    assert re.search(r"wrong rows: 3 of [0-9,]+ checked, FAILED", (tmp_path / "o.html").read_text())


# Bad input


def without(key):
    content = json.loads(DEMO.read_text())
    del content[key]
    return content


def with_row(**changes):
    content = json.loads(DEMO.read_text())
    content["rows"][2].update(changes)
    return content


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "expected a result of fp4comm bench, demo or plan (--json), or a topology (.toml), "
         "got no JSON"),
        ("[1]", "got other JSON"),
        ("[]", "got an empty list"),
        ([json.loads(DEMO.read_text()), {"command": "bench"}],
         "result 1 of the list: ranks: expected a whole number, got nothing"),
        ({"command": "info"}, "got one of info"),
        (json.loads((RESULTS / "plan_h200.json").read_text()), "got one of plan_cuda"),
        (without("ranks"), "ranks: expected a whole number, got nothing"),
        (without("rows"), "rows: expected a list that is not empty, got nothing"),
        (with_row(op=None), "rows.2.op: expected a text, got nothing"),
        (with_row(num_wrong="0"), 'rows.2.num_wrong: expected a whole number, got "0"'),
        (with_row(time={"median_us": 0, "p90_us": 1}), "rows.2.time.median_us: expected a time"),
        (with_row(parts_us={"plan": None}), "rows.2.parts_us.plan: expected a time, got nothing"),
        ({"command": "plan"}, "ranks: expected a whole number, got nothing"),
        *(({**json.loads(DEMO.read_text()), "arguments": {"skew": skew}},
           "arguments.skew: expected a number or balanced, got ")
          for skew in ([1], True, 10**400, "inf")),
    ],
)  # fmt: skip
def test_what_is_no_result_is_refused_in_one_line(tmp_path, content, text):
    bad = tmp_path / "bad.json"
    bad.write_text(content if isinstance(content, str) else json.dumps(content))
    refused = run("report", DEMO, bad, "--html", tmp_path / "o.html")
    assert refused.exit_code == 2
    assert refused.output.startswith(f"Error: {bad}: ")
    assert text in refused.output
    assert refused.output.count("\n") == 1
    assert not (tmp_path / "o.html").exists()


def test_each_bad_file_has_its_line(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    refused = run("report", tmp_path / "a.json", tmp_path / "none.json", tmp_path / "none.toml")
    assert refused.exit_code == 2
    first, second, third = refused.output.splitlines()
    assert first == (
        f"Error: {tmp_path}/a.json: expected a result of fp4comm bench, demo or plan (--json), or"
        " a topology (.toml), got other JSON"
    )
    assert second.startswith(f"{tmp_path}/none.json: expected")
    assert "No such file" in second
    assert third.startswith(f"{tmp_path}/none.toml: expected a topology")


def test_other_mistakes_of_the_command_line(tmp_path):
    assert "Missing argument" in run("report").output
    refused = run("report", tmp_path / "a.toml")
    assert refused.exit_code == 2
    topology = ROOT / "topologies" / "cpu-1g.toml"
    assert "expected a result beside the topology" in run("report", topology).output
    copy = tmp_path / "copy.json"
    copy.write_text(DEMO.read_text())
    refused = run("report", copy, "--json", copy)
    assert "json: expected another file than that of files, got " in refused.output
    assert copy.read_text() == DEMO.read_text()
    (tmp_path / "hard.json").hardlink_to(copy)
    refused = run("report", copy, "--json", tmp_path / "hard.json")
    assert "json: expected another file than that of files, got " in refused.output
    assert copy.read_text() == DEMO.read_text()
    (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    assert run("report", copy, "--json", tmp_path / "link.json").exit_code == 0
    assert json.loads((tmp_path / "target.json").read_text())
    refused = run("report", copy, "--json", tmp_path / "out", "--html", tmp_path / "out")
    assert refused.exit_code == 2
    assert "expected another file than that of" in refused.output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("option", ["json", "html", "png"])
def test_a_full_disk_is_one_line(option):
    refused = run("report", DEMO, f"--{option}", "/dev/full")
    assert refused.exit_code == 2
    assert f"Error: {option}: /dev/full cannot be written: No space left" in refused.output


def test_names_that_are_no_text_are_shown(tmp_path):
    content = json.loads(DEMO.read_text())
    content["workload"] = "routing from bad\udcff.npy"
    odd, page = tmp_path / "odd.json", tmp_path / "odd.html"
    odd.write_text(json.dumps(content))
    passed("report", odd, "--html", page)
    assert "bad\\udcff.npy" in page.read_text()


def test_without_the_extra_the_error_names_it_and_words_still_come(tmp_path, monkeypatch):
    def no_matplotlib(name):
        raise ImportError(name)

    monkeypatch.setattr(page.importlib, "import_module", no_matplotlib)
    refused = run("report", DEMO, "--html", tmp_path / "o.html")
    assert refused.exit_code == 2
    assert "pip install 'fp4comm[report]'" in refused.output
    assert "demo_4_ranks: 4 ranks" in passed("report", DEMO, "--json", tmp_path / "o.json")
