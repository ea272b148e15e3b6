import io
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest
from tests.attention_records import make_benchmark
from tests.browser import chromium
from tests.browser.chromium import Chromium
from tests.comm_records import make_comm
from tests.ddp_records import make_ddp_run
from tests.first import first
from tests.profiles import cpu_run, imported_run, launch_bound_run, profiled_run
from tests.rendering import render_page
from tests.runs import grid, make_run, out_of_memory, recorder_run
from tests.unit.memory_records import imported_snapshot, prediction_of, watched_run

from steplab.records.record import Record
from steplab.records.run import Run
from steplab.report.report import Context

pytestmark = pytest.mark.skipif(
    chromium.PROGRAM is None, reason="no chromium, chromium-browser or google-chrome on PATH"
)

PHONE_WIDTH = 360


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    browser = Chromium(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


LOOSE = [
    make_run({"context": 64}),
    make_run({"context": 128, "model": "medium", "warmup": 2}),
    recorder_run(name="examples.my_model:build", id="1"),
    recorder_run(name="own loop", id="2"),
    recorder_run(name="a_name_without_any_blank_" * 6, id="3"),
]


def studies() -> dict[str, list[Run]]:
    sizes: dict[str, list[object]] = {
        "model": ["small", "medium", "large", "xl", "2.7b"],
        "context": [128, 256, 512, 1024],
        "precision": ["fp32", "bf16"],
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
        "loose": LOOSE,
        "own": [recorder_run(name="a_name_without_any_blank_" * 6), out_of_memory()],
    }


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {
        name: render_page(runs, title=f"Study {name}", description="what it is about")
        for name, runs in studies().items()
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "page.html"


@pytest.mark.parametrize("name", ["small", "large", "own", "profiled"])
def test_the_browser_reads_the_page_as_it_was_meant_and_a_phone_scrolls_it_one_way(
    browser: Chromium, pages: dict[str, str], file: Path, name: str
) -> None:
    file.write_text(pages[name], encoding="utf-8")
    with browser.page(file) as page:
        dom = page.dom
        assert page.complaints == []
        page.resize(PHONE_WIDTH, 700)
        inner, scroll = page.evaluate("[innerWidth, document.scrollingElement.scrollWidth]")
        pictures = page.evaluate("document.querySelectorAll('svg').length")
    assert dom.count("<svg") == pictures == pages[name].count("<svg") >= 1
    assert dom.count("<tr") == pages[name].count("<tr")
    assert dom.count("<section") == pages[name].count("<section")
    assert dom.rstrip().endswith("</html>")
    assert scroll <= inner == PHONE_WIDTH


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_the_page_follows_the_colour_scheme(
    browser: Chromium, pages: dict[str, str], file: Path, scheme: chromium.Scheme
) -> None:
    image = pytest.importorskip("matplotlib.image")
    file.write_text(pages["small"], encoding="utf-8")
    with browser.page(file, height=1600, scheme=scheme) as page:
        shot = io.BytesIO(page.screenshot())
    brightness = image.imread(shot)[:, :, :3].mean(axis=2)
    assert brightness.shape == (1600, 1200)
    background = brightness[4, 4]
    assert background < 0.2 if scheme == "dark" else background > 0.9
    assert abs(brightness - background).max() > 0.6, "nothing legible stands on the background"
    drawn = (abs(brightness - background) > 0.3).mean()
    assert 0.01 < drawn < 0.5, "the page is empty, or painted over"


FIT = """(() => {
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
  return told.join('; ');
})()"""


def test_no_label_of_watched_memory_is_cut_or_runs_into_another(browser: Chromium, file: Path) -> None:
    fields: list[dict[str, object]]
    fields = [{"context": context, "precision": p} for context in (128, 256, 512) for p in ("fp32", "bf16")]
    settings = ("selective", "every_4", "full")
    watched = [watched_run(cell) for cell in fields]
    watched += [watched_run({"context": 512, "checkpointing": name}, checkpointed=True) for name in settings]
    profile = watched[0].memory_profile
    assert profile is not None
    predictions = {watched[0].id: prediction_of(profile)}
    page = render_page([*watched, imported_snapshot()], title="t", about=Context(predictions=predictions))
    told = labels_seen(browser, page, file, 1200)
    assert re.fullmatch(r"(\d+ seen(; |$))+", told), told


@pytest.mark.parametrize("width", first(1, [390, 1200]))
@pytest.mark.parametrize("name", ["loose", "small"])
def test_no_label_is_cut_or_runs_into_another(
    browser: Chromium, pages: dict[str, str], file: Path, name: str, width: int
) -> None:
    told = labels_seen(browser, pages[name], file, width)
    assert re.fullmatch(r"(\d+ seen(; |$))+", told), told


@pytest.fixture(scope="module")
def every_kind() -> str:
    runs = [profiled_run(), watched_run({"context": 256}), make_run({"model": "xl"}), out_of_memory()]
    others: list[Record] = [
        make_benchmark(),
        make_comm({"size": ["1MB", "100MB"], "world_size": [2, 4]}),
        make_ddp_run(),
    ]
    return render_page([*runs, *others], title="Every kind")


@pytest.mark.parametrize("width", first(1, [390, 1920]))
def test_no_text_is_cut_on_a_page_of_every_kind(browser: Chromium, every_kind: str, file: Path, width: int) -> None:
    told = labels_seen(browser, every_kind, file, width)
    assert re.fullmatch(r"(\d+ seen(; |$))+", told), told
    assert len(re.findall("seen", told)) > 10


ACCESSIBLE = """(async () => {
  for (const closed of document.querySelectorAll('details')) closed.open = true;
  const found = await axe.run(document, {resultTypes: ['violations'], rules: {'duplicate-id': {enabled: false}}, ONLY});
  const told = found.violations.map(one => `${one.id} (${one.impact}): ${one.nodes.map(node => node.html).join(' ')}`);
  return told.join('; ') || `${found.passes.length} rules passed`;
})()"""
"""Equal shapes of two pictures share a name."""


@pytest.mark.parametrize("scheme", first(1, ["light", "dark"]))
def test_axe_finds_nothing_and_no_text_is_cut(
    browser: Chromium, every_kind: str, file: Path, scheme: chromium.Scheme
) -> None:
    axe = resources.files(pytest.importorskip("axe_core_python")) / "axe.min.js"
    only = "runOnly: ['color-contrast']" if scheme == "dark" else ""  # nothing else depends on the scheme
    file.write_text(every_kind, encoding="utf-8")
    with browser.page(file, width=1280, scheme=scheme) as page:
        assert re.fullmatch(r"(\d+ seen(; |$))+", labels := page.evaluate(FIT)), labels
        page.evaluate(axe.read_text(encoding="utf-8") + "; 0")
        told = page.evaluate(ACCESSIBLE.replace("ONLY", only))
    passed = re.fullmatch(r"(\d+) rules passed", told)
    assert passed, told
    assert int(passed[1]) >= (1 if scheme == "dark" else 20)


def labels_seen(browser: Chromium, page: str, file: Path, width: int) -> str:
    file.write_text(page, encoding="utf-8")
    with browser.page(file, width=width, height=900) as opened:
        told: str = opened.evaluate(FIT)
    return told


def test_the_security_policy_lets_no_script_run(browser: Chromium, pages: dict[str, str], file: Path) -> None:
    smuggled = pages["small"].replace("</body>", "<script>document.title = 'ran'</script></body>")
    file.write_text(smuggled, encoding="utf-8")
    with browser.page(file) as page:
        assert page.evaluate("document.title") == "Study small"
        assert "Content Security Policy" in str(page.complaints)
