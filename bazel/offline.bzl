"""Repository rules that stand in for what Bazel itself would download."""

def _native_rules_impl(repository_ctx):
    lines = ["%s = native.%s" % (rule, rule) for rule in repository_ctx.attr.rules]
    repository_ctx.file("BUILD")
    repository_ctx.file(repository_ctx.attr.package + "/BUILD")
    repository_ctx.file(repository_ctx.attr.package + "/defs.bzl", "\n".join(lines) + "\n")

native_rules = repository_rule(
    implementation = _native_rules_impl,
    doc = "A rule set whose `defs.bzl` exports Bazel's built-in rules of the same names.",
    attrs = {
        "package": attr.string(mandatory = True, doc = "The package that holds `defs.bzl`."),
        "rules": attr.string_list(mandatory = True, doc = "The rules that it exports."),
    },
)

def _empty_tools_impl(repository_ctx):
    target = 'filegroup(name = "%s", visibility = ["//visibility:public"])'
    repository_ctx.file("BUILD", "\n".join([target % tool for tool in repository_ctx.attr.tools]) + "\n")

empty_tools = repository_rule(
    implementation = _empty_tools_impl,
    doc = "Tools that every test names but none of ours runs, for instance those that measure coverage of C++.",
    attrs = {"tools": attr.string_list(mandatory = True, doc = "The names of the tools.")},
)
