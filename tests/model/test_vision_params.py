"""Vision parameters: read on demand, written back byte for byte, placed, counted, and drawn from a seed."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax import cli
from deepinfer_jax.checkpoint.load import load_model, load_params
from deepinfer_jax.checkpoint.names import expected_tensors, inventory, num_lead_axes, payload_name
from deepinfer_jax.checkpoint.shards import open_shards, read_file
from deepinfer_jax.checkpoint.store import restore_params, save_params
from deepinfer_jax.checkpoint.write import write_file, write_released
from deepinfer_jax.config.model import ModelConfig
from deepinfer_jax.config.places import shipped_config
from deepinfer_jax.config.released import load_config
from deepinfer_jax.engine.describe import describe
from deepinfer_jax.model.draft_params import with_random_draft
from deepinfer_jax.model.params import Params, init_params, leaf_at
from deepinfer_jax.model.parts import schema_of, wanted_schema, with_random_vision
from deepinfer_jax.model.shardings import param_shardings
from deepinfer_jax.model.vision_params import vision_schema
from deepinfer_jax.parallel.mesh import make_mesh
from deepinfer_jax.testing import compare

TINY_A = Path(__file__).parents[1] / "data" / "tiny_a"
GROUPS = ("vision", "aligner", "image span")
BYTES = {"vision": 823_685_120, "aligner": 146_821_120, "image span": 30_720}  # spec: checkpoint 2


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return load_config(TINY_A)


@pytest.fixture(scope="module")
def flash() -> ModelConfig:
    return load_config(shipped_config("model/deepseek-v4.1-flash.json"))


@pytest.fixture(scope="module")
def seeing(config) -> Params:
    weights = TINY_A / "weights_released.safetensors"
    return load_params(TINY_A, config, weights_file=weights, progress=False, with_vision=True)


@pytest.fixture(scope="module")
def complete(seeing, config, tmp_path_factory) -> Path:
    """A checkpoint written from parameters with a vision encoder."""
    directory = tmp_path_factory.mktemp("seeing")
    write_released(seeing, config, directory, num_shards=3, tokenizer=TINY_A / "tokenizer.json")
    return directory


def is_vision(name: str) -> bool:
    return name.startswith(("vision.", "aligner.", "image_"))


def test_schema_covers_every_published_byte(flash):
    assert {group: inventory(flash)[group].num_bytes for group in GROUPS} == BYTES
    assert sum(spec.num_bytes for spec in vision_schema(flash)) == sum(BYTES.values())
    assert sum(is_vision(name) for name in expected_tensors(flash)) == 259 + 4 + 3
    by_path = {spec.path: spec for spec in vision_schema(flash)}
    assert by_path["vision.blocks.w1"].shape == (32, 5632, 1024)
    assert by_path["vision.patch_embed.weight"].shape == (1024, 588)
    assert by_path["vision.aligner.w1.weight"].shape == (5120, 9216)
    assert payload_name(by_path["vision.blocks.wo.bias"], flash, (31,)) == "vision.blocks.31.attn.wo.bias"
    assert payload_name(by_path["vision.image_end"], flash) == "image_end"


def test_seeing_adds_the_encoder_and_nothing_else(seeing, config):
    weights = TINY_A / "weights_released.safetensors"
    blind = load_params(TINY_A, config, weights_file=weights, progress=False)
    assert blind.vision is None
    compare.assert_bitwise(dataclasses.replace(seeing, vision=None), blind)
    assert schema_of(blind, config) == wanted_schema(config, with_draft=False, with_vision=False)
    assert len(schema_of(seeing, config)) == len(schema_of(blind, config)) + len(vision_schema(config))
    for spec in vision_schema(config):
        assert leaf_at(seeing, spec.path).shape == spec.shape, spec.path


def test_leaves_hold_the_tensors_of_the_independent_file(seeing, config):
    original = {t.name: t.data for t in read_file(TINY_A / "weights_bf16.safetensors") if is_vision(t.name)}
    seen = set()
    for spec in vision_schema(config):
        values = np.asarray(leaf_at(seeing, spec.path))
        for lead in np.ndindex(*spec.shape[: num_lead_axes(spec)]):
            name = payload_name(spec, config, lead)
            seen.add(name)
            np.testing.assert_array_equal(values[lead], original[name], err_msg=name)
    assert seen == original.keys()


def test_written_encoder_equals_the_original_file(complete):
    """In the dtype that was read: norms may be BF16 or F32."""
    original = {t.name: t for t in read_file(TINY_A / "weights_released.safetensors") if is_vision(t.name)}
    assert {t.dtype for t in original.values()} == {"BF16", "F32"}
    tensors = open_shards(complete).tensors
    assert {name for name in tensors if is_vision(name)} == original.keys()
    for name, want in original.items():
        got = tensors[name]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        assert got.data.tobytes() == want.data.tobytes(), name


def test_a_dtype_that_no_loader_takes_is_not_written(seeing, config, tmp_path):
    spoiled = seeing.vision.image_start.astype(jnp.float32)
    spoiled = dataclasses.replace(seeing, vision=dataclasses.replace(seeing.vision, image_start=spoiled))
    with pytest.raises(ValueError, match="leaf vision.image_start is float32, the released form is bfloat16"):
        write_released(spoiled, config, tmp_path)


@pytest.mark.parametrize("mesh_shape", [None, (2, 2)], ids=str)
def test_round_trips_on_any_mesh(complete, seeing, config, tmp_path, mesh_shape):
    """Released files and the store; the encoder is replicated."""
    mesh = mesh_shape and make_mesh(*mesh_shape)
    loaded = load_params(complete, config, mesh=mesh, progress=False, with_vision=True)
    compare.assert_bitwise(loaded.vision, seeing.vision)
    if mesh:
        assert all(a.sharding.is_fully_replicated for a in jax.tree.leaves(loaded.vision))
    save_params(loaded, config, tmp_path / "store")
    compare.assert_bitwise(restore_params(tmp_path / "store", config).vision, seeing.vision)


def test_shardings_have_the_tree_of_the_parameters(seeing, config):
    shardings = param_shardings(config, make_mesh(2, 2), with_vision=True)
    assert jax.tree.structure(shardings.vision) == jax.tree.structure(seeing.vision)
    assert param_shardings(config, make_mesh(2, 2)).vision is None


def test_missing_tensor_is_named_with_and_without_vision(complete, config, tmp_path):
    original = {t.name: np.array(t.data) for t in read_file(TINY_A / "weights_bf16.safetensors")}
    for name in ("vision.blocks.1.attn.wqkv.bias", "image_newline"):
        write_file({n: v for n, v in original.items() if n != name}, tmp_path / "damaged.safetensors")
        for with_vision in (False, True):
            with pytest.raises(ValueError, match=name):
                load_params(
                    TINY_A,
                    config,
                    weights_file=tmp_path / "damaged.safetensors",
                    progress=False,
                    with_vision=with_vision,
                )


def test_random_encoder_comes_from_the_seed_alone(config):
    """With and without draft stages the same, in the released dtype, with norms around 1; another seed, other bits."""
    backbone = init_params(config, seed=3)
    plain = with_random_vision(backbone, config, seed=3)
    drafting = with_random_vision(with_random_draft(backbone, config, seed=3), config, seed=3)
    assert plain.vision is not None and drafting.vision is not None and drafting.draft is not None
    compare.assert_bitwise(drafting.vision, plain.vision)
    compare.assert_bitwise(dataclasses.replace(plain, vision=None), backbone)
    other = with_random_vision(backbone, config, seed=4).vision
    assert other is not None
    assert (np.asarray(other.image_end) != np.asarray(plain.vision.image_end)).any()
    assert all(a.dtype == jnp.bfloat16 for a in jax.tree.leaves(plain.vision))
    for norm in (plain.vision.norm, plain.vision.blocks.norm1, plain.vision.blocks.norm2):
        assert abs(float(norm.astype(jnp.float32).mean()) - 1) < 0.1


@pytest.mark.parametrize("with_draft", [False, True], ids=["text", "drafting"])
def test_dummy_weights_have_an_encoder_where_it_is_wanted(config, with_draft: bool):
    params, _ = load_model(TINY_A / "config.json", seed=3, with_draft=with_draft, with_vision=True)
    want = with_random_vision(init_params(config, seed=3), config, seed=3)
    compare.assert_bitwise(params.vision, want.vision)
    assert (params.draft is not None) == with_draft


def test_described_bytes_follow_what_is_loaded(flash, capsys):
    blind, seeing = describe(flash), describe(flash, with_vision=True)
    device = {g.name: g.device_bytes for g in seeing.groups}
    assert {name: device[name] for name in GROUPS} == BYTES
    assert seeing.device_bytes - blind.device_bytes == sum(BYTES.values())
    assert {g.name: g.device_bytes for g in blind.groups} == device | dict.fromkeys(GROUPS, 0)
    assert (seeing.disk_bytes, seeing.total_parameters) == (blind.disk_bytes, blind.total_parameters)
    assert cli.main(["describe", str(TINY_A), "--vision"]) == 0
    assert not capsys.readouterr().out.split("vision ")[1].split("\n")[0].endswith(" 0")


@pytest.mark.parametrize(
    "field, value, text",
    [("num_attention_heads", 32, "hidden_size=64 is not a multiple of 4"), ("max_image_tokens", 3, "3 is below 4")],
)
def test_impossible_encoders_are_refused(config, field: str, value: int, text: str):
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(config, vision=dataclasses.replace(config.vision, **{field: value}))
