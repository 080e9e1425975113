"""What callers give as images: every form of a picture, and clear words for all the rest."""

import base64
import io
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepinfer_jax import LLM, SamplingParams
from deepinfer_jax.checkpoint.load import load_model
from deepinfer_jax.engine import images
from deepinfer_jax.engine.images import ImageReader
from deepinfer_jax.testing import tiny
from deepinfer_jax.text.chat import load_chat_encoder
from tests.engine.driving import add, check_free, drain, facts_of, params_of, reasons
from tests.engine.pictures import IMAGE_ID, picture
from tests.text.test_chat import tiny_chat_tokenizer

EAGER = {"DEEPINFER_ENFORCE_EAGER": "1"}
PLACE = "<｜image｜>"
A, B = picture("A"), picture("B")
PARAMS = SamplingParams(max_tokens=3, seq_seed=1, ignore_eos=True)


def png(array: np.ndarray) -> bytes:
    data = io.BytesIO()
    Image.fromarray(array).save(data, "PNG")
    return data.getvalue()


def data_url(array: np.ndarray) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(array)).decode()}"


@pytest.fixture(scope="module")
def eager(tiny_model: Path):
    """An engine that compiles nothing before it must."""
    return tiny.tiny_engine(tiny_model, EAGER)


def test_every_form_of_a_picture_is_the_same_image(eager, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(png(A))
    forms = [A, Image.fromarray(A), png(A), path, str(path), data_url(A)]
    data = {"image_bytes": forms, "image_sizes": [(84, 84)] * len(forms)}
    built = add(eager, "a", [5, *[IMAGE_ID] * len(forms)], multi_modal_data=data, enqueue=False)
    assert len({image.digest for image in built.images}) == 1
    assert all(image.content is built.images[0].content for image in built.images), "patches are shared"


def test_texts_and_ids_take_images(llm: LLM, text_llm: LLM):
    prompts = [f"What is {PLACE}?", "Nothing", f"{PLACE} and {PLACE}"]
    data = [{"images": [A]}, None, {"images": [B, A]}]
    together = llm.generate(prompts, PARAMS, multi_modal_data=data)
    for prompt, entry, outputs in zip(prompts, data, together, strict=True):
        [again] = llm.generate(prompt, PARAMS, multi_modal_data=entry)
        assert facts_of(again) == facts_of(outputs)
        ids = [llm.get_tokenizer().encode(prompt)]
        [by_ids] = llm.generate(prompt_token_ids=ids, sampling_params=PARAMS, multi_modal_data=[entry])
        assert facts_of(by_ids) == facts_of(outputs)
    [streamed] = [[output for _, output in llm.stream(prompts[0], PARAMS, multi_modal_data=data[0])]]
    assert facts_of(streamed) == facts_of(together[0])
    assert together[0][0].prompt_len == len(llm.get_tokenizer().encode(prompts[0])) - 1 + 8
    texts = text_llm.generate(prompts, PARAMS, multi_modal_data=data)
    assert texts[0] == llm.get_tokenizer().decode([output.token_id for output in together[0]])


# Name -> (prompts, multi_modal_data, exception, what its text says).
BAD: dict = {
    "too few": (
        ["a", f"{PLACE}{PLACE}"],
        [None, {"images": [A]}],
        ValueError,
        "prompt 1 has 2 image pl.* and 1 images",
    ),
    "too many": (["a"], [{"images": [A]}], ValueError, "prompt 0 has 0 image placeholders .token 299. and 1 images"),
    "no data": ([PLACE], None, ValueError, "prompt 0 has 1 image placeholders"),
    "one dict for a list": (["a", "b"], {"images": []}, TypeError, "one entry for each prompt"),
    "entries": (["a", "b"], [None], ValueError, "2 prompts and 1 entries of multi_modal_data"),
    "no dict": (["a", "b"], [None, [A]], TypeError, "multi_modal_data of prompt 1 is of type list"),
    "unknown key": (["a"], [{"images": [], "video": 1}], ValueError, "prompt 0 has 'video'; its keys are images"),
    "both keys": (["a"], [{"images": [], "image_bytes": []}], ValueError, "either images or image_bytes"),
    "no list": ([PLACE], [{"images": png(A)}], TypeError, "the images of prompt 0 are of type bytes; give a list"),
    "damaged": (
        ["a", PLACE * 2],
        [None, {"images": [A, png(A)[:300]]}],
        ValueError,
        "image 1 of prompt 1: the image is damaged",
    ),
    "no image": ([PLACE], [{"images": [b"GIF8 no"]}], ValueError, "image 0 of prompt 0: the data is no image"),
    "no file": ([PLACE], [{"images": ["absent.png"]}], ValueError, "image 0 of prompt 0: .*absent.png cannot be read"),
    "web": ([PLACE], [{"images": ["https://a.b/c.png"]}], ValueError, "image 0 of prompt 0: .*nothing is downloaded"),
    "wrong size": (
        [PLACE],
        [{"images": [A], "image_sizes": [(840, 84)]}],
        ValueError,
        r"image_sizes\[0\]=\(840, 84\) of prompt 0 is not the size",
    ),
    "no size": ([PLACE], [{"images": [A], "image_sizes": [5]}], ValueError, r"image_sizes\[0\]=5 of prompt 0 is no"),
    "sizes": ([PLACE], [{"images": [A], "image_sizes": []}], ValueError, "1 images and 0 image_sizes"),
    "too long": ([PLACE * 40], [{"images": [B] * 40}], ValueError, "prompt 0 with its 40 images has 561 tokens, more"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_refused_and_nothing_is_queued(llm: LLM, name):
    prompts, data, error, text = BAD[name]
    with pytest.raises(error, match=text):
        llm.generate(prompts, PARAMS, multi_modal_data=data)
    assert llm.engine.scheduler.num_unfinished == 0


def test_ids_without_data_are_taken_as_they_are(eager):
    with pytest.warns(UserWarning, match="prompt 0 has 2 image tokens .299. and no multi_modal_data"):
        built = add(eager, "a", [5, IMAGE_ID, IMAGE_ID], enqueue=False)
    assert list(built.prompt) == [5, IMAGE_ID, IMAGE_ID] and not built.images


def test_a_request_with_a_bad_image_leaves_the_others_alone(eager):
    add(eager, "good", [5], params_of(1, 2))
    with pytest.raises(ValueError, match="image 0 of prompt 0: the data is no image"):
        add(eager, "bad", [5, IMAGE_ID], multi_modal_data={"images": [b"x"]})
    assert reasons(drain(eager)) == {"good": "length"}
    check_free(eager)


def test_an_image_larger_than_a_step_is_refused_with_both_numbers(tiny_model):
    engine = tiny.tiny_engine(tiny_model, EAGER, max_num_batched_tokens=12)
    add(engine, "a", [IMAGE_ID], multi_modal_data={"images": [A]}, enqueue=False)
    with pytest.raises(ValueError, match="image 1 of prompt 0 takes 14 tokens, and a step has 12 .max_num_batched"):
        add(engine, "b", [IMAGE_ID] * 2, multi_modal_data={"images": [A, B]})


def test_a_prompt_that_is_not_chunked_has_no_more_images_than_a_step(tiny_model):
    environ = EAGER | {"DEEPINFER_MULTI_MODAL_BUFFER_SIZE": "2"}
    engine = tiny.tiny_engine(tiny_model, environ, chunked_prefill=False, max_num_batched_tokens=512)
    with pytest.raises(ValueError, match="prompt 0 has 3 images, and a step takes 2 of them"):
        add(engine, "a", [IMAGE_ID] * 3, multi_modal_data={"images": [A] * 3})


def test_a_model_without_vision_weights_refuses_images(tiny_model):
    params, _ = load_model(tiny_model)
    engine = tiny.tiny_engine(tiny_model, params=params)
    with pytest.raises(ValueError, match="prompt 0 has images, and this model has no vision weights"):
        add(engine, "a", [IMAGE_ID], multi_modal_data={"images": [A]})
    add(engine, "b", [5], params_of(1, 2))
    assert reasons(drain(engine)) == {"b": "length"}
    assert "images_used" not in engine.stats() and engine.sizes.num_image_places == 0


def test_an_image_that_takes_too_long_is_an_error(monkeypatch, eager):
    def slow(source, vision, *, prompt, image):
        time.sleep(0.3)

    monkeypatch.setattr(images, "prepare_image", slow)
    reader = ImageReader(eager.model.vision, timeout_s=0.05)
    with pytest.raises(RuntimeError, match="image 0 of prompt 0 is not decoded after 0.05 s; .*_WORKER_TIMEOUT"):
        reader.read([{"images": [A]}])
    reader.close()


def test_equal_objects_are_decoded_once(monkeypatch, eager):
    calls: list = []
    prepare = images.prepare_image

    def counting(source, vision, **indices):
        calls.append(indices)
        return prepare(source, vision, **indices)

    monkeypatch.setattr(images, "prepare_image", counting)
    reader = ImageReader(eager.model.vision, timeout_s=10.0)
    found = reader.read([{"images": [A, B]}, None, {"images": [B, A]}])
    assert [[image.plan.num_tokens for image in own] for own in found] == [[8, 14], [], [14, 8]]
    assert len(calls) == 2
    reader.close()


def test_messages_of_a_chat_have_images_among_their_texts(tmp_path):
    encoder = load_chat_encoder(tiny_chat_tokenizer(tmp_path))
    first, last = data_url(A), Path("b.png")
    parts = [
        {"type": "text", "text": "Is "},
        {"type": "image_url", "image_url": {"url": first}},
        {"type": "text", "text": " as "},
        {"type": "image_url", "image_url": {"url": B, "detail": "high"}},
    ]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Yes"}]
    messages += [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": last}}]}]
    prompt = encoder.prepare(messages)
    assert prompt.images[0] is first and prompt.images[1] is B and prompt.images[2] is last
    assert prompt.token_ids.count(encoder.tokenizer.image_id) == 3
    assert parts[1]["image_url"]["url"] is first, "messages stay as they were"


@pytest.mark.parametrize(
    "image, text",
    [
        (
            {"url": "/etc/hosts"},
            "message 0 has an image at '/etc/hosts'; nothing is .*, and texts name no files",
        ),
        ({"url": "https://a.b/c.png"}, "nothing is downloaded"),
        ({"url": A, "detail": "low"}, "message 0 has an image of detail 'low'; leave detail out"),
    ],
)
def test_images_of_a_chat_that_are_refused(tmp_path, image, text):
    encoder = load_chat_encoder(tiny_chat_tokenizer(tmp_path))
    with pytest.raises(ValueError, match=text):
        encoder.prepare([{"role": "user", "content": [{"type": "image_url", "image_url": image}]}])
