"""One py_test for every test file."""

def hop_tf_tests(srcs, data, deps):
    """Makes a py_test of each test file, named like the file without its ending.

    Args:
      srcs: The test files. pytest runs each by itself.
      data: Files that the tests read.
      deps: Libraries that the tests import.
    """
    for src in srcs:
        native.py_test(
            name = src[:-len(".py")],
            size = "medium",
            timeout = "long",
            srcs = [src, "//bazel:run_tests.py"],
            args = ["$(rootpath %s)" % src],
            data = data,
            main = "//bazel:run_tests.py",
            deps = deps,
        )
