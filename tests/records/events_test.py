"""The pages have the same keys as the code."""

import pathlib
import re

from absl.testing import absltest

from hop_tf.records.events import OUTCOMES, Kind

_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "see.md"


class EventsTest(absltest.TestCase):
    def test_the_page_has_all_kinds_and_no_others(self):
        table = _PAGE.read_text().partition("| event | what it is |")[2].partition("\n\n")[0]
        named = re.findall(r"`([A-Z]+)`", "\n".join(row.split("|")[1] for row in table.strip().splitlines()))
        self.assertCountEqual(named, [kind.name for kind in Kind])

    def test_the_page_has_the_outcomes(self):
        text = _PAGE.read_text()
        for name in set(OUTCOMES) - {"jumps"}:
            self.assertIn(f"`{name}`", text)


if __name__ == "__main__":
    absltest.main()
