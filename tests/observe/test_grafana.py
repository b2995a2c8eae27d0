"""The dashboard is what Grafana's JSON schema of dashboards takes, of which this is the part that the dashboard uses.

The schema is Grafana's own, in its repository grafana-foundation-sdk: jsonschema/dashboard.jsonschema.json. It forbids
fields that it does not name. Grafana itself is not run here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

DASHBOARD = Path(__file__).parents[2] / "docs" / "_static" / "grafana.json"


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """An object without fields that the schema does not name."""


class Source(Strict):
    """DataSourceRef."""

    type: str
    uid: str


class Option(Strict):
    """VariableOption."""

    text: str | list[str]
    value: str | list[str]


class Variable(Strict):
    """VariableModel; the query is the data source's own."""

    type: Literal["query", "adhoc", "groupby", "constant", "datasource", "interval", "textbox", "custom"]
    name: str
    query: str | dict[str, Any]
    datasource: Source | None = None
    refresh: Literal[0, 1, 2] = 0
    includeAll: bool = False
    multi: bool = False
    current: Option | None = None


class Grid(Strict):
    """GridPos."""

    h: Annotated[int, Meta(gt=0)]
    w: Annotated[int, Meta(gt=0, le=24)]
    x: Annotated[int, Meta(ge=0, lt=24)]
    y: Annotated[int, Meta(ge=0)]


class Defaults(Strict):
    """FieldConfig."""

    unit: str = ""


class FieldConfig(Strict):
    """FieldConfigSource."""

    defaults: Defaults
    overrides: list[Any]


class Target(Strict):
    """Prometheus' query."""

    refId: str
    expr: str
    legendFormat: str = ""


class Panel(Strict):
    """Panel, with what a panel of time series asks for."""

    id: int
    type: Literal["timeseries"]
    title: str
    datasource: Source
    gridPos: Grid
    fieldConfig: FieldConfig
    targets: Annotated[list[Target], Meta(min_length=1)]


class Span(Strict, rename={"since": "from", "until": "to"}):
    """The dashboard's time."""

    since: str
    until: str


class Variables(Strict, rename={"variables": "list"}):
    """The dashboard's templating."""

    variables: list[Variable]


class Annotations(Strict, rename={"annotations": "list"}):
    """AnnotationContainer."""

    annotations: list[Any]


class Dashboard(Strict):
    """Dashboard."""

    schemaVersion: int
    templating: Variables
    annotations: Annotations
    title: str
    uid: Annotated[str, Meta(min_length=8, max_length=40)]
    version: int
    refresh: str
    time: Span
    tags: list[str]
    panels: list[Panel]


def test_the_dashboard_fits_grafana_s_schema():
    dashboard = msgspec.json.decode(DASHBOARD.read_bytes(), type=Dashboard)
    assert len({panel.id for panel in dashboard.panels}) == len(dashboard.panels)
    names = {variable.name for variable in dashboard.templating.variables}
    assert {panel.datasource.uid for panel in dashboard.panels} == {"${datasource}"}
    assert "datasource" in names


@pytest.mark.parametrize("change", [("annotations", None), ("uid", "short"), ("pannels", [])])
def test_what_the_schema_refuses_is_refused(change):
    name, value = change
    known = {key: each for key, each in json.loads(DASHBOARD.read_text()).items() if key != name}
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps(known | ({} if value is None else {name: value})), type=Dashboard)
