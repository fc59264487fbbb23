"""Calls a server through a client library: clients.py openai|litellm|langchain URL. clients.sh runs it."""

import sys

NAME, URL = sys.argv[1], sys.argv[2] + "/v1"
PAGE = "a page is room for the keys and values of a few tokens in all layers. it is the unit of memory."
ASKED = [{"role": "user", "content": "What is a page?"}]
LONG = [{"role": "user", "content": "page " * 5000}]


def by_openai():
    import openai

    chats = openai.OpenAI(base_url=URL, api_key="none").chat.completions
    said = chats.create(model="glossary", messages=ASKED, temperature=0).choices[0].message.content
    chunks = chats.create(model="glossary", messages=ASKED, temperature=0, stream=True)
    return said, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def by_litellm():
    import litellm

    to = {"model": "openai/glossary", "api_base": URL, "api_key": "none", "temperature": 0}
    said = litellm.completion(messages=ASKED, **to).choices[0].message.content
    chunks = litellm.completion(messages=ASKED, stream=True, **to)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    try:
        litellm.completion(messages=LONG, **to)
    except litellm.ContextWindowExceededError:
        return said, streamed
    raise AssertionError("litellm does not recognise the error of a context that is too long")


def by_langchain():
    import langchain_openai

    chat = langchain_openai.ChatOpenAI(model="glossary", base_url=URL, api_key="none", temperature=0)
    said = chat.invoke("What is a page?")
    assert said.usage_metadata["output_tokens"] > 20, said
    return said.content, "".join(chunk.content for chunk in chat.stream("What is a page?"))


for answer in {"openai": by_openai, "litellm": by_litellm, "langchain": by_langchain}[NAME]():
    assert answer.strip() == PAGE, answer
