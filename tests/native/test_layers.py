"""What became full since the last look, in many layers at once: against the plain way, layer by layer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aiote_native.requests.prepared import OfferedLayers, PushedLayers

NUMBERS = st.integers(0, 12)


class Offered(OfferedLayers):
    """Notes what it is called for."""

    def __init__(self, layers, tokens, computed=False):
        self.open_layers(layers, tokens, computed)
        self.calls = []

    def on_computed(self):
        self.calls.append("computed")

    def refuse_layer(self, layer):
        self.calls.append(layer)


class PlainPush:
    """The units of a request that were sent, layer by layer and group by group."""

    def __init__(self, layers, groups, spans, units, tokens):
        self.layers, self.groups, self.spans, self.units, self.tokens = layers, groups, spans, units, tokens
        self.sent = {layer: [span.start for span in spans] for layer in layers}
        self.left = set(layers)

    def take(self, computed):
        """Return the units of each group that became full, by the position of the layer."""
        found = {}
        for position, layer in enumerate(self.layers):
            if layer not in self.left:
                continue
            spans = [range(0)] * len(self.spans)
            for group in set(self.groups[position]):
                whole, unit, sent = self.spans[group], self.units[group], self.sent[layer][group]
                full = computed[layer] // unit if unit else whole.start
                stop = whole.stop if computed[layer] >= self.tokens else min(max(full, sent), whole.stop)
                spans[group], self.sent[layer][group] = range(sent, stop), stop
            if any(spans):
                found[position] = spans
            if computed[layer] >= self.tokens:
                self.left.discard(layer)
        return found


@st.composite
def requests(draw):
    layers = draw(st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True))
    count = draw(st.integers(1, 3))
    groups = [draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3)) for _ in layers]
    units = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    tokens = draw(NUMBERS)
    starts = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    # As many units as the tokens have: the mapping makes spans that do not end beyond them.
    more = st.integers(0, 2)
    pairs = zip(starts, units, strict=True)
    stops = [-(-tokens // unit) if unit else start + draw(more) for start, unit in pairs]
    spans = [range(start, max(start, stop)) for start, stop in zip(starts, stops, strict=True)]
    steps = draw(st.lists(st.one_of(st.none(), st.tuples(st.sampled_from(layers), NUMBERS)), max_size=30))
    return layers, groups, spans, units, tokens, steps


@given(requests())
def test_layers_are_taken_as_each_would_be_by_itself(request):
    layers, groups, spans, units, tokens, steps = request
    offered = Offered([*layers, 99], 12)
    push = PushedLayers(offered, layers, groups, spans, units, tokens)
    plain = PlainPush(layers, groups, spans, units, tokens)
    for step in [*steps, None]:
        if step is not None:
            offered.computed(*step, stream=step[0] % 2)
            continue
        taken = push.take()
        found = {place: spans for spans, places, _ in taken for place in places}
        assert found == plain.take(offered.computed_to)
        assert sum(len(places) for _, places, _ in taken) == len(found)
        # Layers with the same units and the same stream come together.
        assert len({(tuple(spans), stream) for spans, _, stream in taken}) == len(taken)
        assert push.left == len(plain.left)


def test_a_unit_is_taken_once():
    offered = Offered([5, 6], 12)
    push = PushedLayers(offered, [6], [[0]], [range(1, 5)], [3], 12)
    offered.computed(6, 8)
    assert push.take() == [([range(1, 2)], [0], None)]
    assert push.take() == []
    offered.computed(6)
    assert push.take() == [([range(2, 5)], [0], None)]
    assert (push.take(), push.left) == ([], 0)


@given(st.lists(st.tuples(st.integers(0, 3), st.one_of(st.none(), st.integers(0, 1 << 70))), max_size=20))
def test_an_offer_knows_how_far_each_layer_is(steps):
    offered, plain = Offered([3, 1, 2], 9), dict.fromkeys([3, 1, 2], 0)
    refused = 0
    for layer, tokens in steps:
        offered.computed(layer, tokens)
        if layer in plain:
            plain[layer] = max(plain[layer], 9 if tokens is None else min(tokens, 1 << 62))
        refused += layer not in plain
    assert offered.computed_to == plain
    assert offered.complete == (min(plain.values()) >= 9)
    assert offered.calls.count(0) == refused
    assert offered.calls.count("computed") == (len(steps) > refused)
    offered.hear()
    offered.computed(1)
    assert offered.calls[-1] == "computed"
    offered.take_back()
    assert set(offered.computed_to.values()) == {0}


def test_an_offer_without_layers_is_complete_without_tokens():
    assert Offered([], 0).complete
    assert not Offered([], 1).complete
    assert Offered([1, 2], 5, computed=True).complete
