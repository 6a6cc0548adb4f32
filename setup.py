"""Where the packages of hop_tf lie in the source tree. Everything else is declared in pyproject.toml."""

from setuptools import find_packages, setup

# `strategies/` and `ops/` are top-level folders of the source tree and subpackages of hop_tf once installed.
_SUBPACKAGES = ("strategies", "ops")


def _packages() -> list[str]:
    packages = find_packages(include=["hop_tf", "hop_tf.*"])
    for name in _SUBPACKAGES:
        packages += [f"hop_tf.{package}" for package in find_packages(include=[name, f"{name}.*"])]
    return packages


setup(
    packages=_packages(),
    package_dir={f"hop_tf.{name}": name for name in _SUBPACKAGES},
    package_data={"": ["*.proto"], "hop_tf": ["py.typed"]},
)
