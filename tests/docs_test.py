"""The READMEs and the pages in docs/: links lead somewhere, code is code, and the names in it exist."""

import ast
import functools
import importlib
import importlib.util
import itertools
import pathlib
import re

from absl.testing import absltest, parameterized

import hop_tf

_HAS_RAY = importlib.util.find_spec("ray") is not None
if _HAS_RAY:
    import ray  # noqa: F401  (it sets an environment variable, which a test would leave behind)

_ROOT = pathlib.Path(__file__).parents[1]
_PAGES = [
    *(_ROOT / folder / "README.md" for folder in ("", "benchmarks", "examples")),
    *sorted((_ROOT / "docs").rglob("*.md")),
]
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)|^\.\. auto\w+:: (.+)$", re.MULTILINE)
_NAME = re.compile(r"\bhop_tf(?:\.[A-Za-z]\w*)+")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def _anchors(page):
    """Returns the anchors that GitHub and the site derive from a page's headings."""
    headings = _HEADING.findall(page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _exists(name):
    """True if `hop_tf.a.b` is a module that can be imported, or an attribute of one."""
    if name.startswith(("hop_tf.tools.ray", "hop_tf.integrations.ray")) and not _HAS_RAY:
        return True  # Runs with Ray check the name.
    first, *rest = name.split(".")[1:]
    found = hop_tf
    for number, part in enumerate([first, *rest]):
        if not hasattr(found, part):
            try:
                found = importlib.import_module(".".join(name.split(".")[: number + 2]))
            except ImportError:
                return False
        else:
            found = getattr(found, part)
    return True


class DocsTest(parameterized.TestCase):
    @parameterized.parameters(*(str(page.relative_to(_ROOT)) for page in _PAGES))
    def test_page(self, name):
        page = _ROOT / name
        text = page.read_text()
        for target in _LINK.findall(text):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            linked = (page.parent / path).resolve() if path else page
            self.assertTrue(linked.exists(), f"{name} links to {target}")
            if anchor:
                self.assertIn(anchor, _anchors(linked), f"{name} links to {target}")
        for block in _BLOCK.findall(text):
            ast.parse(block)
        exists = functools.cache(_exists)
        quoted = [*_BLOCK.findall(text), *itertools.chain.from_iterable(_QUOTED.findall(text))]
        missing = {name for each in quoted for name in _NAME.findall(each) if not exists(name)}
        self.assertEmpty(missing)

    def test_finds_the_pages(self):
        self.assertGreater(len(_PAGES), 10)

    def test_every_page_is_in_the_index(self):
        folder = _ROOT / "docs"
        pages = [str(page.relative_to(folder).with_suffix("")) for page in folder.rglob("*.md")]
        lines = (folder / "index.md").read_text().splitlines()
        self.assertContainsSubset(set(pages) - {"index"}, lines)

    def test_the_glossary_defines_the_words(self):
        for page in _PAGES:
            self.assertNotRegex(page.read_text(), r"[Aa] \*rank\*( or \*worker\*)? is\b", page.name)

    def test_every_example_is_on_the_map(self):
        text = (_ROOT / "examples" / "README.md").read_text()
        files = [path.name for pattern in ("*.py", "*.ipynb") for path in (_ROOT / "examples").glob(pattern)]
        self.assertGreater(len(files), 10)
        for name in files:
            self.assertIn(f"`{name}`", text)

    def test_readme_is_short(self):
        self.assertLessEqual(len((_ROOT / "README.md").read_text().splitlines()), 150)


if __name__ == "__main__":
    absltest.main()
