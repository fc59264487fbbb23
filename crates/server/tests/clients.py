"""Calls a server through a client library: clients.py openai|litellm|langchain URL. clients.sh runs it."""

import sys

NAME, URL = sys.argv[1], sys.argv[2] + "/v1"
PAGE = "a page is room for the keys and values of a few tokens in all layers. it is the unit of memory."
QUESTION = [{"role": "user", "content": "What is a page?"}]
LONG = [{"role": "user", "content": "page " * 5000}]


def by_openai():
    import openai

    chats = openai.OpenAI(base_url=URL, api_key="none").chat.completions
    answer = chats.create(model="glossary", messages=QUESTION, temperature=0).choices[0].message.content
    chunks = chats.create(model="glossary", messages=QUESTION, temperature=0, stream=True)
    return answer, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def by_litellm():
    import litellm

    to = {"model": "openai/glossary", "api_base": URL, "api_key": "none", "temperature": 0}
    answer = litellm.completion(messages=QUESTION, **to).choices[0].message.content
    chunks = litellm.completion(messages=QUESTION, stream=True, **to)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    try:
        litellm.completion(messages=LONG, **to)
    except litellm.ContextWindowExceededError:
        return answer, streamed
    raise AssertionError("litellm does not recognise the error of a context that is too long")


def by_langchain():
    import langchain_openai

    chat = langchain_openai.ChatOpenAI(model="glossary", base_url=URL, api_key="none", temperature=0)
    answer = chat.invoke("What is a page?")
    assert answer.usage_metadata["output_tokens"] > 20, answer
    return answer.content, "".join(chunk.content for chunk in chat.stream("What is a page?"))


for text in {"openai": by_openai, "litellm": by_litellm, "langchain": by_langchain}[NAME]():
    assert text.strip() == PAGE, text
