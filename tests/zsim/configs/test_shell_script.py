"""The lines of a shell script that would run, told from its text, and what of it is asked."""

from __future__ import annotations

import pytest

from tests.support.configs import imported
from zsim import ScenarioError
from zsim.configs.scripts.shell_script import lines_of

SCRIPT = """\
#!/bin/bash
GPUS=`nvidia-smi -L | wc -l`
SIZE="${SIZE:-small}"
MODE=${MODE:-0}
if [[ $SIZE == "small" ]]; then  # a laptop's
    LAYERS=2; WIDTH=64
    HEADS=4
elif [ "$SIZE" = large ]
then
    LAYERS=4
    WIDTH=128
    HEADS=8
else
    echo "unknown"; exit 1
fi
ARGS="
    --num-layers $LAYERS --hidden-size ${WIDTH:-64} --num-attention-heads $HEADS \\
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size $((2 * HEADS / 8)) \\
"
if [ $MODE -ge 1 ] && [ -n "$SIZE" ]; then ARGS="$ARGS --use-torch-fsdp2"; else
    ARGS="$ARGS --use-distributed-optimizer"; fi
torchrun --nproc_per_node $GPUS pretrain_gpt.py $ARGS --bf16
"""
OPEN = {"batch__sequence_length": None, "batch__micro_batch": None, "model": None}


def script(folder, text=SCRIPT, **answers):
    """The import of a script on two ranks."""
    return imported(folder, text, "megatron", name="train.sh", **OPEN | {"cluster__ranks": 2}
                    | answers)


def test_a_condition_over_known_values_chooses_its_branch(tmp_path):
    tables = script(tmp_path).scenario.tables
    assert tables["model"]["sizes"]["num_layers"] == 2
    assert tables["batch"]["micro_batch"] == 1
    assert tables["strategy"]["name"] == "zero1"


def test_the_user_sets_a_scripts_variables_in_capitals(tmp_path):
    tables = script(tmp_path, SIZE="large", MODE=1).scenario.tables
    assert tables["model"]["sizes"]["hidden_size"] == 128
    assert tables["batch"]["micro_batch"] == 2
    assert tables["strategy"]["name"] == "fsdp2"


def test_variables_without_one_value_are_asked_by_name_at_once(tmp_path):
    text = SCRIPT.replace("${SIZE:-small}", "$1").replace("LAYERS=2; ", "LAYERS=$(ls); ")
    with pytest.raises(ScenarioError) as caught:
        script(tmp_path, text)
    assert str(caught.value).partition("train.sh: ")[2] == (
        "variables: the script gives no value, or several, to HEADS, WIDTH, LAYERS; give --set "
        "HEADS=…, and so on"
    )


def test_open_conditions_have_both_branches_read_and_told(tmp_path):
    text = SCRIPT + 'if [ -z "$RUN" ]; then\n  train --mock-data\nfi\n'
    result = script(tmp_path, text)
    assert "mock_data" in result.ignored
    assert any('both branches of [ -z "$RUN" ], which nothing' in said for said in result.assumed)
    assert not any("both" in said for said in script(tmp_path, text, RUN="").assumed)


@pytest.mark.parametrize(("condition", "taken"), [
    ('[ "a" = a ]', True), ("[[ a != a ]]", False), ("[ ! 2 -gt 1 ]", False),
    ('[ -z "" ]', True), ("[[ 1 -eq 1 && 2 -eq 1 ]]", False),
    ("[ 1 -eq 2 ] || [ 3 -le 3 ]", True), ("[ 1 -eq 1 ] && $UNKNOWN", None),
    ("[ 1 -eq 2 ] && $UNKNOWN", False), ("grep -q x file", None), ('[ "unclosed ]', None),
    ("[ a -eq 1 ]", None),
])
def test_conditions_are_true_false_or_open(condition, taken):
    text = f"if {condition}; then\nyes\nelse\nno\nfi\nend"
    undecided: list[str] = []
    ran = list(lines_of(text, {}, undecided))
    assert ran == {True: ["yes", "end"], False: ["no", "end"], None: ["yes", "no", "end"]}[taken]
    assert bool(undecided) is (taken is None)


def test_a_later_value_of_a_variable_counts_unless_only_a_branch_may_have_set_it():
    text = "A=1\nA=2\ntwo $A\nif $OPEN; then\nA=3\nfi\nopen $A\nA=4\nfour $A"
    ran = [line for line in lines_of(text, {}, []) if " " in line]
    assert ran == ["two 2", "open $A", "four 4"]


@pytest.mark.parametrize(("written", "value"), [
    ("$((2*3))", "6"), ("$(( 7 / 2 ))", "3"), ("$((A * (B - 1)))", "15"),
    ("$((1 / 0))", "$((1 / 0))"), ("$((2 ** 9))", "$((2 ** 9))"),
    ("$((__import__))", "$((__import__))"),
])
def test_arithmetic_of_whole_numbers_is_done_and_no_other(written, value):
    assert list(lines_of(f"A=5\nB=4\n{written}", {}, []))[-1] == value
