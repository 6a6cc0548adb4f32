"""A repository rule that makes an installed Python environment usable by Bazel."""

_DESCRIBE = """
import sys, sysconfig
print(sys.executable)
print(sysconfig.get_path("platlib"))
"""

_BUILD = """
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

# A directory of links to packages: links to tens of thousands of files would take longer to make than the tests to run.
py_library(
    name = "site_packages",
    data = ["site-packages"],
    imports = ["site-packages"],
)

py_runtime(
    name = "runtime",
    interpreter_path = "{interpreter}",
    python_version = "PY3",
)

py_runtime_pair(
    name = "runtime_pair",
    py3_runtime = ":runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":runtime_pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

def _python_environment_impl(repository_ctx):
    workspace = repository_ctx.path(Label("//:WORKSPACE")).dirname
    python = repository_ctx.os.environ.get("HOP_TF_PYTHON") or str(workspace) + "/.venv/bin/python"
    result = repository_ctx.execute([python, "-c", _DESCRIBE])
    if result.return_code != 0:
        fail("%s cannot be run: %s. `make bazel` makes one, or set HOP_TF_PYTHON." % (python, result.stderr.strip()))
    interpreter, site_packages = result.stdout.strip().split("\n")
    for entry in repository_ctx.path(site_packages).readdir():
        if not entry.basename.startswith("hop_tf"):  # Bazel tests its own copy
            repository_ctx.symlink(entry, "site-packages/" + entry.basename)
    repository_ctx.file("BUILD", _BUILD.format(interpreter = interpreter))

python_environment = repository_rule(
    implementation = _python_environment_impl,
    doc = """Links the site-packages of an installed Python, and makes a toolchain of its interpreter.

The environment variable HOP_TF_PYTHON names the Python. Without it, that of the Makefile's `.venv` is used.
""",
    configure = True,
    environ = ["HOP_TF_PYTHON"],
    local = True,
)
