"""One py_test for every test file."""

def hop_tf_tests(srcs, data, deps):
    """Makes a py_test of each test file, named like the file without its ending.

    Args:
      srcs: The test files. Each runs by itself, as `python <file>`.
      data: Files that the tests read.
      deps: Libraries that the tests import.
    """
    for src in srcs:
        native.py_test(
            name = src[:-len(".py")],
            size = "medium",
            timeout = "long",
            srcs = [src],
            data = data,
            main = src,
            deps = deps,
        )
