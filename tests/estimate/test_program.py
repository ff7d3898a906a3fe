"""What is read from a program's text, against what is known of the program."""

import jax
import jax.numpy as jnp
import pytest

from gptlite.errors import UserError
from gptlite.estimate.hardware import HARDWARE, describe
from gptlite.estimate.program import _groups, _Reader, parse, work

H100 = HARDWARE["h100"]


def compiled(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return str(jax.jit(function).lower(*arguments).compile().as_text())


def test_a_product_in_a_loop_counts_as_often_as_the_loop_runs():
    def step(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=7)[0]

    found = work(compiled(step, (16, 32), (32, 32)), H100)
    assert found.flops == found.wide_flops == 7 * 2 * 16 * 32 * 32


def test_bytes_of_an_elementwise_function_are_those_of_its_arguments_and_result():
    found = work(compiled(lambda x, y: jnp.sin(x) * y + 1, (64, 128), (64, 128)), H100)
    assert found.read == 2 * 4 * 64 * 128
    assert found.written == 4 * 64 * 128
    assert found.seconds == (found.read + found.written) / H100.bandwidth
    assert found.flops == 0


PROGRAM = """
HloModule example

%fused (param_0: bf16[8,4], param_1: bf16[16,4]) -> bf16[8,16] {
  %param_1 = bf16[16,4]{1,0} parameter(1)
  %param_0 = bf16[8,4]{1,0} parameter(0)
  ROOT %dot.1 = bf16[8,16]{1,0} dot(%param_0, %param_1), lhs_contracting_dims={1}
}

%cut (param_0: f32[100,8], param_1: s32[]) -> f32[1,8] {
  %param_0 = f32[100,8]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  ROOT %row.1 = f32[1,8]{1,0} dynamic-slice(%param_0, %param_1, %param_1)
}

%condition (state: (s32[], bf16[8,4])) -> pred[] {
  %state.1 = (s32[], bf16[8,4]{1,0}) parameter(0)
  %end = s32[] constant(8)
  %count = s32[] get-tuple-element(%state.1), index=0
  ROOT %less = pred[] compare(%count, %end), direction=LT
}

%body (state: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %state.2 = (s32[], bf16[8,4]{1,0}) parameter(0)
  %count.1 = s32[] get-tuple-element(%state.2), index=0
  %x.1 = bf16[8,4]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%state.2), index=1
  %two = s32[] constant(2)
  %count.2 = s32[] add(%count.1, %two)
  %shifted = bf16[8,4]{1,0} collective-permute(%x.1), source_target_pairs={{0,1},{1,0}}
  ROOT %next = (s32[], bf16[8,4]{1,0}) tuple(%count.2, %shifted)
}

ENTRY %main (x: bf16[8,4], w: bf16[16,4], table: f32[100,8], row: s32[]) -> bf16[8,16] {
  %x = bf16[8,4]{1,0} parameter(0)
  %w = bf16[16,4]{1,0} parameter(1)
  %table = f32[100,8]{1,0} parameter(2)
  %row = s32[] parameter(3)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[8,4]{1,0}) tuple(%zero, %x)
  %loop = (s32[], bf16[8,4]{1,0}) while(%start), condition=%condition, body=%body
  %picked = f32[1,8]{1,0} fusion(%table, %row), kind=kLoop, calls=%cut
  %gathered = (bf16[16,4]{1,0}, bf16[64,4]{1,0}) all-gather-start(%w), replica_groups=[2,4]<=[8]
  %whole = bf16[64,4]{1,0} all-gather-done(%gathered)
  %summed = f32[100,8]{1,0} all-reduce(%table), replica_groups=mesh['a'=2,'b'=8] {'a'}
  ROOT %out = bf16[8,16]{1,0} fusion(%x, %w), kind=kOutput, calls=%fused
}
"""


def test_a_program_is_read_operation_by_operation():
    found = work(PROGRAM, H100)
    assert found.flops == 2 * 8 * 16 * 4
    assert found.wide_flops == 0
    assert dict(found.collectives) == {
        "collective-permute": [4, 4 * 2 * 8 * 4],  # the loop counts to 8 by twos
        "all-gather": [1, 3 * 2 * 16 * 4],  # among 4
        "all-reduce": [1, 2 * 4 * 100 * 8 / 2],  # among 2
    }
    # Of the all-reduce, each pair has a device in each of two hosts.
    across = 4 * 100 * 8 / 50e9
    assert found.link_seconds == pytest.approx(across + (256 + 384) / H100.link)


def test_a_fusion_reads_only_the_part_that_it_cuts_out():
    computations, entry = parse(PROGRAM)
    assert entry == "main"
    picked = computations["main"]["picked"]
    only = {"main": {name: computations["main"][name] for name in ("table", "row")}}
    only["main"]["picked"] = picked
    found = _Reader({**computations, **only}, H100).work("main")
    assert found.read == 4 * 8 + 4  # a row, and its number
    assert found.written == 4 * 8


def test_a_fusion_that_writes_in_place_reads_and_writes_the_part():
    program = """
%put (param_0: f32[100,8], param_1: f32[1,8], param_2: s32[]) -> f32[100,8] {
  %param_0 = f32[100,8]{1,0} parameter(0)
  %same = f32[100,8]{1,0} bitcast(%param_0)
  %param_1 = f32[1,8]{1,0} parameter(1)
  %param_2 = s32[] parameter(2)
  ROOT %new = f32[100,8]{1,0} dynamic-update-slice(%same, %param_1, %param_2, %param_2)
}

ENTRY %main (table: f32[100,8], row: f32[1,8], place: s32[]) -> f32[100,8] {
  %table = f32[100,8]{1,0} parameter(0)
  %row = f32[1,8]{1,0} parameter(1)
  %place = s32[] parameter(2)
  ROOT %out = f32[100,8]{1,0} fusion(%table, %row, %place), kind=kLoop, calls=%put
}
"""
    found = work(program, H100)
    assert found.read == 4 * 8 + 4
    assert found.written == 4 * 8


ASYNC = """
%begin (param_0: bf16[4,8]) -> (bf16[4,8], bf16[16,8], u32[]) {
  %param_0 = bf16[4,8]{1,0} parameter(0)
  %gather.1 = bf16[16,8]{1,0} all-gather(%param_0), channel_id=5, GROUPS
  ROOT %all.1 = (bf16[4,8]{1,0}, bf16[16,8]{1,0}, u32[]{:S(2)}) custom-call(%gather.1, %param_0)
}

%go_on (param_0: bf16[4,8], param_1: bf16[16,8]) -> (f32[32], bf16[16,8]) {
  %param_0 = bf16[4,8]{1,0} parameter(0)
  %param_1 = bf16[16,8]{1,0} parameter(1)
  %param_2 = u32[]{:S(2)} parameter(2)
  %param_3 = f32[32]{0} parameter(3)
  %gather.2 = bf16[16,8]{1,0} all-gather(%param_0), channel_id=5, GROUPS
  %sine = f32[32]{0} sine(%param_3)
  ROOT %all.2 = (f32[32]{0}, bf16[16,8]{1,0}) custom-call(%gather.2, %sine, %param_1, %param_2)
}

%sum_up (param_0: f32[16,8]) -> f32[4,8] {
  %param_0 = f32[16,8]{1,0} parameter(0)
  %sum = f32[16,8]{1,0} all-reduce(%param_0), channel_id=6, GROUPS
  ROOT %part = f32[4,8]{1,0} dynamic-slice(%sum)
}

ENTRY %main (w: bf16[4,8], x: f32[32], dw: f32[16,8]) -> (f32[32], bf16[16,8]) {
  %w = bf16[4,8]{1,0} parameter(0)
  %x = f32[32]{0} parameter(1)
  %dw = f32[16,8]{1,0} parameter(2)
  %start = (bf16[4,8]{1,0}, bf16[16,8]{1,0}, u32[]{:S(2)}) fusion(%w), \
    ALIASES={{0}: (0, {})}, calls=%begin
  %part.1 = bf16[4,8]{1,0} get-tuple-element(%start), index=0
  %whole.1 = bf16[16,8]{1,0} get-tuple-element(%start), index=1
  %flag = u32[]{:S(2)} get-tuple-element(%start), index=2
  %scattered = f32[4,8]{1,0} fusion(%dw), calls=%sum_up, emitter="AllReduceScatterFusion"
  ROOT %both = (f32[32]{0}, bf16[16,8]{1,0}) fusion(%part.1, %whole.1, %flag, %x), \
    ALIASES={{1}: (1, {})}, calls=%go_on
}
""".replace("GROUPS", "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}").replace(
    "ALIASES", "output_to_operand_aliasing"
)


NETWORK, LINK = 50e9, 450e9  # of an H100


@pytest.mark.parametrize(
    ("kind", "gpus", "seconds"),
    [
        ("all-gather", 8, 7 / LINK),
        # Of 15 parts, each GPU takes one from the other host, and has 14 from its neighbours.
        ("all-gather", 16, 14 / LINK),
        ("all-gather", 64, 7 / NETWORK),
        ("all-reduce", 64, 2 * 7 / 64 / NETWORK),
        ("reduce-scatter", 64, 7 / 64 / NETWORK),
        # Nobody else wants what a GPU has from another host.
        ("all-to-all", 8, 7 / 8 / LINK),
        ("all-to-all", 16, 8 / 16 / NETWORK),
        ("all-to-all", 64, 56 / 64 / NETWORK),
    ],
)
def test_gpus_of_a_host_share_what_comes_to_all_of_them(kind, gpus, seconds):
    program = (
        "ENTRY %main (x: f32[1024]) -> f32[1024] {\n  %x = f32[1024]{0} parameter(0)\n"
        f"  ROOT %y = f32[1024]{{0}} {kind}(%x), replica_groups=[1,{gpus}]<=[{gpus}]\n}}\n"
    )
    assert (H100.network, H100.link) == (NETWORK, LINK)
    assert work(program, H100).link_seconds == pytest.approx(4 * 1024 * seconds)


def test_a_loop_of_unknown_length_is_counted():
    text = PROGRAM.replace("direction=LT", "direction=NE")
    assert work(PROGRAM, H100).unknown_loops == 0
    assert work(text, H100).unknown_loops == 1
    assert work(text, H100).collectives["collective-permute"][0] == 1


def test_a_collective_that_goes_on_in_several_fusions_counts_once():
    found = work(ASYNC, HARDWARE["v5e"])
    assert dict(found.collectives) == {
        "all-gather": [1, 3 * 2 * 4 * 8],
        "reduce-scatter": [1, 4 * 16 * 8 * 3 / 4],  # which the text has as an all-reduce
    }
    # The gathered matrix is written once, and the sine reads and writes its own.
    assert found.written == 2 * 16 * 8 + 4 * 4 * 8 + 4 * 32
    assert found.read == 4 * 16 * 8 + 2 * 4 * 8 + 4 * 32


def test_groups_are_the_devices_of_a_mesh_in_its_order():
    assert _groups("replica_groups=mesh['a'=2,'b'=3] {'a'}") == [[0, 3], [1, 4], [2, 5]]
    order = "replica_groups=mesh['a'=2,'b'=3], device_ids=([3,2]T(1,0)) {'a'}"
    assert _groups(order) == [[0, 1], [2, 3], [4, 5]]
    assert _groups("replica_groups=[3,2]<=[2,3]T(1,0)") == [[0, 3], [1, 4], [2, 5]]


def test_a_convolution_that_is_a_product_has_the_flops_of_the_product():
    """As XLA's TPU compiler writes them: a batch of products [128, 64] x [64, 128] for 4 rows and
    12 heads; a product whose result is split into heads; a sum over rows and positions."""
    lines = {
        2 * 4 * 12 * 128 * 128 * 64: (
            "f32[4,12,128,128]", "bf16[4,12,128,64]", "bf16[4,12,128,64]",
            "window={size=4x12 stride=3x11 lhs_dilate=4x12}, dim_labels=01bf_01oi->01bf",
        ),
        2 * 4 * 1024 * 12 * 64 * 768: (
            "bf16[4,1024,12,64]", "bf16[4,1024,768,1]", "bf16[12,64,768,1]",
            "window={size=1x12 pad=0_0x11_11 rhs_reversal=0x1}, dim_labels=0bf1_1oi0->0b1f",
        ),
        2 * 4 * 1024 * 50304 * 768: (
            "bf16[50304,768,1]", "bf16[4,1024,50304]", "bf16[4,1024,768]",
            "window={size=4}, dim_labels=0fb_0io->bf0",
        ),
    }  # fmt: skip
    for flops, (result, left, right, labels) in lines.items():
        program = (
            f"ENTRY %main (a: {left}, b: {right}) -> {result} {{\n"
            f"  %a = {left} parameter(0)\n  %b = {right} parameter(1)\n"
            f"  ROOT %c = {result} convolution(%a, %b), {labels}\n}}\n"
        )
        assert work(program, H100).flops == flops


def test_attention_kernels_are_known_by_name_with_the_products_that_the_mask_leaves():
    queries, keys = "bf16[2,4,256,64]", "bf16[2,2,256,64]"
    scope = "jit(run)/transpose(jvp(splash{}))/shard_map/splash_mha_{}_no_residuals/pallas_call"
    product = 2 * 2 * 4 * 256 * 256 * 64
    for result, target, attributes, flops in (
        (queries, "__cudnn$fmhaSoftmax", 'mask_type="CAUSAL"', 2 * product / 2),
        (
            queries,
            "__cudnn$fmhaSoftmax",
            'mask_type="CAUSAL" "sliding_window_length": 0',
            2 * product / 2,
        ),
        (queries, "__cudnn$fmhaSoftmaxBackward", 'mask_type="NO_MASK"', 5 * product),
        (queries, "tpu_custom_call", scope.format("_causal", "fwd"), 2 * product / 2),
        (keys, "tpu_custom_call", scope.format("", "dkv"), 4 * product),
        (queries, "tpu_custom_call", scope.format("_causal", "dq"), 3 * product / 2),
        # Of 256 queries, all but the first three see 4 keys: 1,018 pairs.
        (queries, "__cudnn$fmhaSoftmax", '"sliding_window_length": 4', 2 * product * 1018 / 256**2),
        (queries, "tpu_custom_call", scope.format("_window4", "fwd"), 2 * product * 1018 / 256**2),
        (queries, "tpu_custom_call", scope.format("_window300", "fwd"), 2 * product / 2),
    ):
        found = work(
            f"ENTRY %main (q: {queries}, k: {keys}) -> {result} {{\n"
            f"  %q = {queries} parameter(0)\n  %k = {keys} parameter(1)\n"
            f'  ROOT %c = {result} custom-call(%q, %k, %k), custom_call_target="{target}", '
            'frontend_attributes={kernel_metadata={\n"block": 512\n}}, '
            f'metadata={{op_name="{attributes}"}}\n}}\n',
            H100,
        )
        assert found.flops == flops
        assert found.wide_flops == 0
        assert sum(found.attention.values()) == 1


@pytest.mark.parametrize(
    "target",
    [
        "h100",
        "h100:0",
        "gtx:8",
        "v5e:16",
        "h100:12",
        "h100:4x4",
        "v5e:3x3",
        "v5e:4x4x4",
        "v6e:32x32",
        "v5p:4x4",
        "",
        ":",
    ],
)
def test_a_target_that_does_not_exist_is_refused(target):
    with pytest.raises(UserError, match=r"--for .* got '?"):
        describe(target)
