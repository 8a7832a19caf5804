"""Modelfiles: what they say, where they are wrong, and that what is written is read as the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pelton.errors import InvalidRequest
from pelton.hub import modelfile
from pelton.hub.preset import Preset, PresetMessage

TEXT = '''
# A plumber
from smollm2:latest
  PARAMETER temperature 0.25
parameter STOP "a b"
PARAMETER stop c
PARAMETER num_ctx 4096
PARAMETER num_gpu 1
SYSTEM """
You are Mario.
# This is no comment
"""
Template {{ messages[0].content }}
MESSAGE user Is it "hot"?
MESSAGE assistant """Yes,
very."""
LICENSE MIT
LICENSE """Apache
2.0"""
'''


def test_what_a_modelfile_says():
    base, preset = modelfile.parse(TEXT)
    assert base == "smollm2:latest"
    assert preset == Preset(
        system="\nYou are Mario.\n# This is no comment\n",
        template="{{ messages[0].content }}",
        parameters={"temperature": 0.25, "stop": ["a b", "c"], "num_ctx": 4096, "num_gpu": "1"},
        messages=(
            PresetMessage(role="user", content='Is it "hot"?'),
            PresetMessage(role="assistant", content="Yes,\nvery."),
        ),
        license=("MIT", "Apache\n2.0"),
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("SYSTEM a", "no FROM"),
        ("FROM a\n\nCOLOUR red", "line 3: 'COLOUR red' begins with none of FROM"),
        ("FROM a\nSYSTEM", "line 2: SYSTEM has no value"),
        ('FROM a\nSYSTEM """b\n\nc', "line 2: SYSTEM: the three quotes"),
        ('FROM a\nSYSTEM """b""" c', "line 2: 'c' stands behind"),
        ("FROM a\nPARAMETER colour red", "line 2: PARAMETER: there is no parameter 'colour'"),
        ("FROM a\nPARAMETER temperature", "line 2: PARAMETER: a name and a value"),
        ("FROM a\nPARAMETER temperature hot", "line 2: PARAMETER: PARAMETER.temperature"),
        ("FROM a\nPARAMETER mirostat 1", "line 2: PARAMETER: PARAMETER.mirostat is 1"),
        ("FROM a\nMESSAGE tool b", "line 2: MESSAGE: the role is 'tool'"),
        ("FROM a\nADAPTER b.gguf", "line 2: ADAPTER: adapters cannot be run"),
        ("FROM a\nTEMPLATE {{- if .System }}x{{ end }}", "line 2: TEMPLATE: the template is in Go's syntax"),
        ('FROM a\nTEMPLATE """{{ .Prompt }}"""', "Go's syntax ('{{ .Prompt }}')"),
    ],
)
def test_where_it_is_wrong(text, problem):
    with pytest.raises(InvalidRequest) as caught:
        modelfile.parse(text)
    assert problem in caught.value.message


@pytest.mark.parametrize(
    "template", ["{{ bos_token }}{% if x %}", "{{- message.content -}}", "{{ range(3) }}", "{{ (x) }}"]
)
def test_templates_in_jinja_are_not_taken_for_gos(template):
    assert modelfile.parse(f'FROM a\nTEMPLATE """{template}"""').preset.template == template


TEXTS = st.text(st.sampled_from('ab#"\\ \t\n\u2028{}é'), min_size=1).filter(
    lambda text: '"""' not in text and not text.startswith('"') and not text.endswith('"')
)


@given(
    st.builds(
        Preset,
        system=st.none() | TEXTS,
        parameters=st.fixed_dictionaries(
            {},
            optional={"temperature": st.floats(0, 2), "seed": st.integers(0, 99), "stop": st.lists(TEXTS, min_size=1)},
        ),
        messages=st.lists(
            st.builds(PresetMessage, role=st.sampled_from(["user", "assistant"]), content=TEXTS), max_size=3
        ).map(tuple),
        license=st.lists(TEXTS, max_size=2).map(tuple),
    )
)
def test_what_is_written_is_read_as_the_same(preset):
    assert modelfile.parse(modelfile.write("base", preset)) == ("base", preset)
