from tests.documents import chapter_says
from tests.stored_records import stored

from steplab import units
from steplab.records.advice import Advice


def test_the_chapter_tells_the_newest_walk_of_2_7b() -> None:
    walks = stored("walk_h200", Advice)
    own = [each for each in walks if each.spec and (each.spec.model.label, each.spec.context) == ("2.7b", 512)]
    walk = max(own, key=lambda each: each.created_utc)
    rows = []
    for tried in walk.kept:
        assert tried.ratio is not None
        assert tried.predicted_share is not None
        before_s = tried.ratio.a
        after_s = before_s * tried.ratio.ratio
        figures = (before_s * tried.predicted_share, before_s - after_s, after_s)
        rows.append(f"| {tried.words} | {' | '.join(map(units.format_time, figures))} |")
    chapter_says("advise", *rows, f"begins at record {walk.start_id} and ends at {walk.kept[-1].run_id}")
