"""The house: folders and the arrows between them. See `docs/architecture.md`."""

import ast
import itertools
import os
import pathlib
import subprocess
import sys

import networkx as nx
from absl.testing import absltest

import hop_tf

_PACKAGE = pathlib.Path(hop_tf.__file__).parent
_MAX_FLAT_FILES = 15
_MAX_CHAIN = 16
_USES_OF_VARIABLES = {"Variable", "assign", "assign_add", "assign_sub", "read_value", "value", "numpy"}
# Names by which programs import tools; and the command line.
_DOORS = {
    *("hop_tf.__main__", "hop_tf.emulation", "hop_tf.integrations.ray", "hop_tf.planning", "hop_tf.simulate"),
    *("hop_tf.testing", "hop_tf.timing"),
}


def _modules():
    """The file of every module, by its name."""
    modules = {}
    for folder in hop_tf.__path__:
        root = pathlib.Path(folder)
        in_tree = () if root == _PACKAGE else ("strategies", "ops")  # They lie beside it in a source tree.
        paths = (
            [*root.rglob("*.py")] if root == _PACKAGE else [p for name in in_tree for p in (root / name).rglob("*.py")]
        )
        for path in paths:
            parts = ["hop_tf", *path.relative_to(root).with_suffix("").parts]
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def _imports(path, modules):
    """The modules of hop_tf that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hop_tf"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("hop_tf"))


def _name(node):
    """The last part of a dotted name; "" for another expression."""
    return getattr(node, "attr", getattr(node, "id", ""))


def _room(module):
    """The folder that a module lies in; each strategy and each tool has one of its own."""
    parts = module.split(".")
    return ".".join(parts[: 3 if parts[1:2] in (["strategies"], ["tools"]) else 2])


class ArchitectureTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.modules = _modules()
        cls.arrows = [
            (module, target)
            for module, path in cls.modules.items()
            for target in _imports(path, cls.modules)
            if target != module
        ]

    def test_finds_all(self):
        self.assertContainsSubset(
            {
                "hop_tf.strategy",
                "hop_tf.strategies.hop.exchange",
                "hop_tf.ops.native",
                "hop_tf.tools.ray.backend",
            },
            self.modules,
        )

    def test_few_files_are_flat(self):
        self.assertLessEqual(len(list(_PACKAGE.glob("*.py"))), _MAX_FLAT_FILES)

    def test_no_circles(self):
        """Neither of modules nor of folders: arrows go down."""
        rooms = [(_room(one), _room(other)) for one, other in self.arrows if _room(one) != _room(other)]
        for arrows in (self.arrows, rooms):
            circles = [each for each in nx.strongly_connected_components(nx.DiGraph(arrows)) if len(each) > 1]
            self.assertEmpty(circles)

    def test_chains_of_imports_are_short(self):
        """Without the tools, and without the programs' names for them."""
        arrows = [arrow for arrow in self.arrows if not any(each.startswith("hop_tf.tools") for each in arrow)]
        chain = nx.dag_longest_path(nx.DiGraph(arrows))
        self.assertLessEqual(len(chain), _MAX_CHAIN, chain)

    def test_strategies_know_nothing_of_each_other(self):
        found = [
            (one, other)
            for one, other in self.arrows
            if one.startswith("hop_tf.strategies.")
            and other.startswith("hop_tf.strategies.")
            and _room(one) != _room(other)
        ]
        self.assertEmpty(found)

    def test_training_does_without_tools(self):
        found = [
            (one, other)
            for one, other in self.arrows
            if other.startswith(("hop_tf.tools", *_DOORS)) and not one.startswith("hop_tf.tools") and one not in _DOORS
        ]
        self.assertEmpty(found)

    def test_a_training_loads_no_tool(self):
        """Unless the environment asks for one: see `hop_tf.runtime.plugins`."""
        code = (
            "import sys, keras, numpy, hop_tf\n"
            "with hop_tf.HopStrategy().scope(): model = keras.Sequential([keras.layers.Dense(1)])\n"
            "model.compile('sgd', 'mse')\n"
            "model.fit(numpy.ones((4, 2)), numpy.ones((4, 1)), verbose=0)\n"
            "print([name for name in sys.modules if name.startswith('hop_tf.tools')])"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
        self.assertEqual(run.stdout.splitlines()[-1:], ["[]"], run.stderr)

    def rooms_that_import(self, *prefixes):
        found = set()
        for module, path in self.modules.items():
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                if any(f"{name}.".startswith(f"{prefix}.") for name, prefix in itertools.product(names, prefixes)):
                    found.add(_room(module))
        return found

    def test_private_parts_of_keras_and_tensorflow_are_known_in_one_folder(self):
        self.assertEqual(self.rooms_that_import("keras.src", "tensorflow.python"), {"hop_tf.keras_hook"})

    def test_modules_of_exchanges_neither_read_nor_write_variables(self):
        """They run on threads. Values come from the graph and go back to it: `Group.submit` and `Group.collect`."""
        calls = {}
        for module, path in self.modules.items():
            nodes = [*ast.walk(ast.parse(path.read_text()))]
            bases = [_name(base) for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases]
            if any(base.endswith("Exchange") for base in bases):
                calls[module] = {_name(node.func) for node in nodes if isinstance(node, ast.Call)}
        self.assertLen([module for module in calls if module.startswith("hop_tf.strategies.")], 5)
        self.assertEmpty({module for module, names in calls.items() if names & _USES_OF_VARIABLES})

    def test_ray_is_imported_by_its_tool_alone(self):
        self.assertEqual(self.rooms_that_import("ray"), {"hop_tf.tools.ray"})


if __name__ == "__main__":
    absltest.main()
