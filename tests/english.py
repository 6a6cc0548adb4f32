"""Plain English, as far as a machine can tell: first words of docstrings, long sentences, riddles. See `make lint`.

This checks docstrings and comments of all code, and the pages for users.
"""

import ast
import io
import itertools
import pathlib
import re
import tokenize

from absl.testing import absltest

_ROOT = pathlib.Path(__file__).parents[1]
_FOLDERS = ("benchmarks", "examples", "hop_tf", "ops", "strategies", "tests")
_PAGES = ("README.md", "CHANGELOG.md", "examples/README.md")  # And all pages in docs/.

# A docstring begins with a verb ("Returns the mean."), a noun ("The mean."), or "True if".
_FIRST = re.compile(r"(As many|How|Nobody|Nothing|So many|So much|Told|What|When|Where|Whether|Which|Who|Whom|Whose)\b")
_RIDDLES = re.compile(r"\b(be it|nobody else than|so many of them|that of that)\b", re.IGNORECASE)
# Items of a list count as sentences.
_SENTENCE_END = re.compile(r"(?<=[.?!:;])\)?\s+|\s[-*] ")
_MOST_WORDS = 30
# Code, rows of tables and hard line breaks of Markdown are no running text.
_NO_TEXT = re.compile(r"^```.*?^```$|^\|.*?$|\\$", re.MULTILINE | re.DOTALL)


def _docstrings(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AsyncFunctionDef | ast.ClassDef | ast.FunctionDef | ast.Module):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def _comments(source):
    """Blocks of lines, each as one text."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = [(token.start[0], token.string.lstrip("# ")) for token in tokens if token.type == tokenize.COMMENT]
    for _, block in itertools.groupby(enumerate(lines), lambda pair: pair[1][0] - pair[0]):
        block = [line for _, line in block]
        yield block[0][0], " ".join(text for _, text in block)


def _pages():
    """The text of each Markdown page, paragraph by paragraph, with the name of the page."""
    for path in [*map(_ROOT.joinpath, _PAGES), *sorted((_ROOT / "docs").rglob("*.md"))]:
        for paragraph in re.split(r"\n\s*\n", _NO_TEXT.sub("\n\n", path.read_text())):
            yield str(path.relative_to(_ROOT)), paragraph


def _sentences(text):
    """Those of running text: not of tables and formulas, whose lines are indented, or have columns."""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.splitlines()
        if not any(re.search(r"\S {2,}\S", line) or line.startswith("    ") for line in lines):
            yield from _SENTENCE_END.split(" ".join(" ".join(lines).split()))


class EnglishTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.docstrings, cls.texts, cls.pages = [], [], list(_pages())
        for folder in _FOLDERS:
            for path in sorted((_ROOT / folder).rglob("*.py")):
                source, name = path.read_text(), path.relative_to(_ROOT)
                found = [(f"{name}:{line}", text) for line, text in _docstrings(source)]
                cls.docstrings += found
                cls.texts += found + [(f"{name}:{line}", text) for line, text in _comments(source)]

    def test_there_are_texts(self):
        self.assertGreater(len(self.docstrings), 4000)
        self.assertGreater(len(self.texts), len(self.docstrings))
        self.assertGreater(len(self.pages), 800)

    def test_first_words(self):
        found = [f"{place} {text.splitlines()[0]}" for place, text in self.docstrings if _FIRST.match(text)]
        self.assertEmpty(found)

    def test_riddles(self):
        found = [f"{place} {match[0]}" for place, text in self.texts + self.pages if (match := _RIDDLES.search(text))]
        self.assertEmpty(found)

    def test_sentences_are_short(self):
        found = [
            f"{place} {len(sentence.split())} words: {sentence}"
            for place, text in self.texts + self.pages
            for sentence in _sentences(text)
            if len(sentence.split()) > _MOST_WORDS
        ]
        self.assertEmpty(found)


if __name__ == "__main__":
    absltest.main()
