"""What a pytest that a test runs in a process of its own is told: to be as strict as this one."""

INI = """\
[pytest]
addopts = --strict-markers
filterwarnings =
  error
  ignore:Module already imported so cannot be rewritten. _aiote_editable_loader:pytest.PytestAssertRewriteWarning
"""
"""An editable install is imported before pytest asks for its plugin's modules, as pyproject.toml says, too."""
