"""The page in a real browser: it renders, follows the colour scheme, and fits a phone."""

import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest
from tests.attention_records import make_benchmark
from tests.comm_records import make_comm
from tests.ddp_records import make_ddp_run
from tests.profiles import cpu_run, imported_run, launch_bound_run, profiled_run
from tests.runs import grid, make_run, out_of_memory, recorder_run
from tests.unit.memory_records import imported_snapshot, prediction_of, watched_run

from steplab.records.record import Record
from steplab.records.run import Run
from steplab.report.page import render_page
from steplab.report.sections import Context

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))),
    None,
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on PATH")

PHONE_WIDTH = 360
SCHEMES = {"dark": 0, "light": 1}
"""Blink's preferredColorScheme, an enumeration of its own."""


def chromium(tmp_path: Path, *arguments: str) -> str:
    """What a headless browser with a fresh profile wrote to standard output."""
    assert CHROMIUM is not None
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        "--force-device-scale-factor=1",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    done = subprocess.run(
        [CHROMIUM, *flags, *arguments], capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path
    )
    return done.stdout


def studies() -> dict[str, list[Run]]:
    """A small study, a large one with failures, a run that has no spec, and runs with profiles."""
    sizes: dict[str, list[object]] = {
        "model": ["small", "medium", "large", "xl", "2.7b"],
        "context": [128, 256, 512, 1024],
        "precision": ["fp32", "bf16"],
        "pass": ["forward", "forward_backward", "train"],
    }
    choices: dict[str, list[object]] = {
        "model": ["tiny"],
        "context": [64, 128, 256],
        "precision": ["fp32", "bf16"],
        "attention": ["plain", "sdpa"],
    }
    return {
        "small": grid(choices),
        "large": grid(sizes, memory_bytes=60e9),
        "profiled": [profiled_run(), launch_bound_run(), cpu_run(), imported_run()],
        "own": [recorder_run(name="a_name_without_any_blank_" * 6), out_of_memory()],
    }


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {
        name: render_page(runs, title=f"Study {name}", description="what it is about")
        for name, runs in studies().items()
    }


@pytest.mark.parametrize("name", ["small", "large", "own", "profiled"])
def test_the_browser_reads_the_page_as_it_was_meant(pages: dict[str, str], tmp_path: Path, name: str) -> None:
    (tmp_path / "page.html").write_text(pages[name], encoding="utf-8")
    dom = chromium(tmp_path, "--dump-dom", (tmp_path / "page.html").as_uri())
    assert dom.count("<svg") == pages[name].count("<svg") >= 1
    assert dom.count("<tr") == pages[name].count("<tr")
    assert dom.count("<section") == pages[name].count("<section")
    assert dom.rstrip().endswith("</html>")


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_the_page_follows_the_colour_scheme(pages: dict[str, str], tmp_path: Path, scheme: str) -> None:
    image = pytest.importorskip("matplotlib.image")
    (tmp_path / "page.html").write_text(pages["small"], encoding="utf-8")
    chromium(
        tmp_path,
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        "--window-size=1200,1600",
        f"--screenshot={tmp_path / 'shot.png'}",
        (tmp_path / "page.html").as_uri(),
    )
    brightness = image.imread(tmp_path / "shot.png")[:, :, :3].mean(axis=2)
    assert brightness.shape == (1600, 1200)
    background = brightness[4, 4]
    assert background < 0.2 if scheme == "dark" else background > 0.9
    assert abs(brightness - background).max() > 0.6, "nothing legible stands on the background"
    drawn = (abs(brightness - background) > 0.3).mean()
    assert 0.01 < drawn < 0.5, "the page is empty, or painted over"


@pytest.mark.parametrize("name", ["small", "large", "own", "profiled"])
def test_a_phone_never_scrolls_the_page_sideways(pages: dict[str, str], tmp_path: Path, name: str) -> None:
    # A headless window has a least width above a phone's, so the page sits in a frame of that width. The copy
    # measured here has a script of the test's own, which the page's security policy would refuse.
    probe = (
        "<script>addEventListener('load', () => parent.postMessage("
        "[innerWidth, document.scrollingElement.scrollWidth, document.querySelectorAll('svg').length], '*'"
        "))</script>"
    )
    copy, removed = re.subn(r"<meta http-equiv=[^>]*>", "", pages[name])
    assert removed == 1
    (tmp_path / "page.html").write_text(copy.replace("</head>", probe + "</head>"), encoding="utf-8")
    (tmp_path / "phone.html").write_text(
        "<script>addEventListener('message', e => document.title = e.data.join(' '))</script>"
        f'<iframe src="page.html" style="width:{PHONE_WIDTH}px;height:700px;border:0"></iframe>',
        encoding="utf-8",
    )
    dom = chromium(tmp_path, "--virtual-time-budget=5000", "--dump-dom", (tmp_path / "phone.html").as_uri())
    measured = re.search(r"<title>(\d+) (\d+) (\d+)</title>", dom)
    assert measured, dom[:500]
    inner, scroll, pictures = map(int, measured.groups())
    assert inner == PHONE_WIDTH
    assert scroll <= inner
    assert pictures == pages[name].count("<svg")


LOOSE = [
    make_run({"context": 64}),
    make_run({"context": 128, "model": "medium", "warmup": 2}),
    recorder_run(name="examples.my_model:build", id="1"),
    recorder_run(name="own loop", id="2"),
    recorder_run(name="a_name_without_any_blank_" * 6, id="3"),
]
"""Runs of no study, whose names are of all lengths."""

FIT = """<script>addEventListener('load', () => {
  const told = [];
  for (const closed of document.querySelectorAll('details')) closed.open = true;
  for (const svg of document.querySelectorAll('svg')) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
    for (const [index, [said, box]] of texts.entries()) {
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1 ||
          box.top < frame.top - 1)
        told.push(`cut: ${said}`);
      if (svg.closest('#time, #memory'))
        for (const [other, its] of texts.slice(index + 1))
          if (Math.min(box.right, its.right) - Math.max(box.left, its.left) > 1 &&
              Math.min(box.bottom, its.bottom) - Math.max(box.top, its.top) > 4)
            told.push(`over each other: ${said} / ${other}`);
    }
    told.push(`${texts.length} seen`);
  }
  const lines = '.bars .name, .bars .figure, .facts strong, h1, h2, h3, .verdict p, dd, dt';
  for (const box of document.querySelectorAll(lines)) {
    const its = box.getBoundingClientRect();
    if (box.scrollWidth > box.clientWidth + 1 && box.clientWidth) told.push(`cut: ${box.textContent}`);
    if (its.right > innerWidth + 1) told.push(`beyond the page: ${box.textContent}`);
  }
  const beside = [...document.querySelectorAll('.facts p, dl div')];
  for (const box of beside) {
    const [left, right] = [...box.children].map(child => child.getBoundingClientRect());
    if (right && left.right > right.left + 1 && left.bottom > right.top + 1 && right.bottom > left.top + 1)
      told.push(`over each other: ${box.textContent}`);
  }
  parent.postMessage(told.join('; '), '*');
})</script>"""


def test_no_label_of_watched_memory_is_cut_or_runs_into_another(tmp_path: Path) -> None:
    fields: list[dict[str, object]]
    fields = [{"context": context, "precision": p} for context in (128, 256, 512) for p in ("fp32", "bf16")]
    settings = ("selective", "every_4", "full")
    watched = [watched_run(cell) for cell in fields]
    watched += [watched_run({"context": 512, "checkpointing": name}, checkpointed=True) for name in settings]
    profile = watched[0].memory_profile
    assert profile is not None
    predictions = {watched[0].id: prediction_of(profile)}
    page = render_page([*watched, imported_snapshot()], title="t", about=Context(predictions=predictions))
    told = labels_seen(page, tmp_path, 1200)
    assert re.fullmatch(r"(\d+ seen(; |$))+", told), told


@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("name", ["loose", "small"])
def test_no_label_is_cut_or_runs_into_another(tmp_path: Path, name: str, width: int) -> None:
    told = labels_seen(render_page(LOOSE if name == "loose" else studies()["small"], title="labels"), tmp_path, width)
    assert re.fullmatch(r"(\d+ seen(; |$))+", told), told


@pytest.fixture(scope="module")
def every_kind() -> str:
    """A page of records of every kind."""
    runs = [profiled_run(), watched_run({"context": 256}), make_run({"model": "xl"}), out_of_memory()]
    others: list[Record] = [
        make_benchmark(),
        make_comm({"size": ["1MB", "100MB"], "world_size": [2, 4]}),
        make_ddp_run(),
    ]
    return render_page([*runs, *others], title="Every kind")


@pytest.mark.parametrize("width", [1920, 1280, 390])
def test_no_text_is_cut_on_a_page_of_every_kind(every_kind: str, tmp_path: Path, width: int) -> None:
    told = labels_seen(every_kind, tmp_path, width)
    assert re.fullmatch(r"(\d+ seen(; |$))+", told), told
    assert len(re.findall("seen", told)) > 10


ACCESSIBLE = """<script src="axe.min.js"></script><script>addEventListener('load', async () => {
  for (const closed of document.querySelectorAll('details')) closed.open = true;
  const found = await axe.run(document, {resultTypes: ['violations'], rules: {'duplicate-id': {enabled: false}}, ONLY});
  const told = found.violations.map(one => `${one.id} (${one.impact}): ${one.nodes.map(node => node.html).join(' ')}`);
  document.title = told.join('; ') || `${found.passes.length} rules passed`;
})</script>"""
"""Shapes that two pictures share have one name, and are the same."""


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_axe_finds_nothing(every_kind: str, tmp_path: Path, scheme: str) -> None:
    axe = resources.files(pytest.importorskip("axe_core_python")) / "axe.min.js"
    (tmp_path / "axe.min.js").write_bytes(axe.read_bytes())
    only = "runOnly: ['color-contrast']" if scheme == "dark" else ""  # nothing else depends on the scheme
    copy = re.sub(r"<meta http-equiv=[^>]*>", "", every_kind)
    copy = copy.replace("</head>", ACCESSIBLE.replace("ONLY", only) + "</head>")
    (tmp_path / "page.html").write_text(copy, encoding="utf-8")
    dom = chromium(
        tmp_path,
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        "--window-size=1280,1000",
        "--virtual-time-budget=60000",
        "--dump-dom",
        (tmp_path / "page.html").as_uri(),
    )
    told = re.search(r"<title>(.*?)</title>", dom, re.DOTALL)
    assert told
    passed = re.fullmatch(r"(\d+) rules passed", told[1])
    assert passed, told[1]
    assert int(passed[1]) >= (1 if scheme == "dark" else 20)


def test_the_browser_has_nothing_to_complain_of(pages: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(pages["profiled"], encoding="utf-8")
    assert CHROMIUM is not None
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom")
    done = subprocess.run(
        [CHROMIUM, *flags, f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "page.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def labels_seen(page: str, tmp_path: Path, width: int) -> str:
    """Labels that are cut or collide in the page's pictures, and how many each has, as a browser lays them out."""
    copy, removed = re.subn(r"<meta http-equiv=[^>]*>", "", page)
    assert removed == 1
    (tmp_path / "page.html").write_text(copy.replace("</head>", FIT + "</head>"), encoding="utf-8")
    (tmp_path / "frame.html").write_text(
        "<script>addEventListener('message', e => document.title = e.data)</script>"
        f'<iframe src="page.html" style="width:{width}px;height:900px;border:0"></iframe>',
        encoding="utf-8",
    )
    dom = chromium(tmp_path, "--virtual-time-budget=5000", "--dump-dom", (tmp_path / "frame.html").as_uri())
    told = re.search(r"<title>(.*?)</title>", dom, re.DOTALL)
    assert told, dom[:500]
    return told[1]


def test_the_security_policy_lets_no_script_run(pages: dict[str, str], tmp_path: Path) -> None:
    smuggled = pages["small"].replace("</body>", "<script>document.title = 'ran'</script></body>")
    (tmp_path / "page.html").write_text(smuggled, encoding="utf-8")
    dom = chromium(tmp_path, "--dump-dom", (tmp_path / "page.html").as_uri())
    assert "<title>Study small</title>" in dom
