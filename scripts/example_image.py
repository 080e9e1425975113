"""Draws a picture and asks the embedded model about it: the cells of a notebook, one after the other.

The embedded model was never shown a picture before, so what it says of this one means nothing; that another picture
gives other words shows that it was looked at.
"""

from PIL import Image, ImageDraw

from deepinfer_jax import LLM, SamplingParams

# %% A picture: a red sun over blue water.
picture = Image.new("RGB", (320, 240), "white")
draw = ImageDraw.Draw(picture)
draw.ellipse((200, 30, 270, 100), fill=(220, 40, 40))
draw.rectangle((0, 170, 320, 240), fill=(40, 90, 200))

# %% One image token for each image, anywhere in the text.
llm = LLM(max_num_seqs=16, max_model_len=1024)
tokenizer = llm.get_tokenizer()
assert tokenizer.image_id is not None, "this tokenizer has no image token"
prompt = f"The picture {tokenizer.token_text(tokenizer.image_id)} shows"
params = SamplingParams(temperature=0.0, max_tokens=24)
[answer] = llm.generate(prompt, params, multi_modal_data={"images": [picture]})
print(repr(answer))

# %% Several prompts: a list of dicts, and None where there is no image.
mirrored = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
answers = llm.generate(
    [prompt, prompt, "The quick brown fox"],
    params,
    multi_modal_data=[{"images": [picture]}, {"images": [mirrored]}, None],
)
for text in answers:
    print(repr(text))
print("the same picture gives the same words:", answers[0] == answer)
print("another picture gives other words:", answers[1] != answer)

# %% The same picture was encoded once.
stats = llm.stats()
print({name: stats[name] for name in ("images_used", "images_encoded", "images_found")})
