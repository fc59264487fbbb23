#!/usr/bin/env python3
"""Renders chat templates with transformers.

    reference.py [--write]        checks (or writes) cases.json and published.json from the cases below
    reference.py FOLDER RENDER    renders each FOLDER/*.jinja with transformers and with RENDER, and compares the bytes

`published` contains templates of models whose licence permits a copy; SOURCES.md lists them. FOLDER contains other
published templates, such as models/templates of llama.cpp. RENDER is the example `render` of this package, which takes
a folder with a template and reads messages and arguments from standard input. Needs transformers and jinja2.
"""
import datetime
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from transformers.utils.chat_template_utils import _compile_jinja_template as compile_template

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CALL = {"id": "call00001", "type": "function", "function": {"name": "get", "arguments": {"city": "Zürich", "days": [1, 2.5], "deep": {"a": None}}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "description": "Looks up <the> \"weather\" & more",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where"},
                "days": {"type": "array", "items": {"type": "number"}, "default": [1]},
            },
            "required": ["city"],
        },
    },
}
TALK = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": "  Hi & <b>'there'</b> é  "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
    {"role": "user", "content": "And?"},
]
CALLS = TALK[:2] + [
    {"role": "assistant", "content": "", "reasoning_content": "look", "thinking": "look", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "name": "get", "content": "{\"degrees\": 7}"},
    {"role": "user", "content": "Thanks"},
]
NULL_CALLS = [{**message, "content": None} if "tool_calls" in message else message for message in CALLS]
BARE_CALLS = [{name: value for name, value in message.items() if value is not None} for message in NULL_CALLS]

# Name, template, messages, arguments.
CASES = [
    ("for and if", "{% for m in messages %}{{ loop.index0 }}{{ loop.index }}{{ loop.revindex }}{{ loop.length }}{% if loop.first %}F{% elif loop.last %}L{% else %}-{% endif %}{{ m['role'] }}:{{ m.content | trim }}\n{% endfor %}", TALK, {}),
    ("for if else", "{% for m in messages if m.role == 'x' %}x{% else %}none{% endfor %}|{% for m in messages if m.role != 'user' %}{{ loop.index }}{{ m.role }}{% endfor %}", TALK, {}),
    ("neighbours", "{% for m in messages %}{{ loop.previtem.role if loop.previtem is defined else '^' }}<{{ m.role }}>{{ loop.nextitem.role if loop.nextitem is defined else '$' }} {% endfor %}", TALK, {}),
    ("not loop first", "{% for m in messages %}{%- if not loop.first %}, {% endif %}{{ m.role }}{% endfor %}", TALK, {}),
    ("break and continue", "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{% if loop.last %}{% break %}{% endif %}{{ m.role }} {% endfor %}", TALK, {}),
    ("namespace", "{% set ns = namespace(found=false, last=-1, text='') %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.found = true %}{% set ns.last = loop.index0 %}{% set ns.text = ns.text + m.content %}{% endif %}{% endfor %}{{ ns.found }} {{ ns.last }} {{ ns.text }}", TALK, {}),
    ("macros", "{% macro line(role, text='none', end='\\n') -%}{{ role | upper }}: {{ text }}{{ end }}{%- endmacro %}{% for m in messages %}{{ line(m.role, text=m.content) }}{% endfor %}{{ line('x') }}", TALK, {}),
    ("recursive macro", "{% macro kind(t) %}{% if t.type == 'array' %}{{ kind(t['items']) }}[]{% elif t.type is string %}{{ t.type }}{% else %}any{% endif %}{% endmacro %}{% for name, p in tools[0].function.parameters.properties.items() %}{{ name }}: {{ kind(p) }}{% if name in tools[0].function.parameters.required %}!{% endif %};{% endfor %}", TALK, {"tools": [TOOL]}),
    ("call blocks", "{% macro box(x) %}[{{ x }}{{ caller() }}]{% endmacro %}{% call box('a') %}b{{ messages | length }}{% endcall %}", TALK, {}),
    ("set blocks", "{% set block %}\n{{ messages[0].content }}x{% endset %}{{ block | trim }}|{{ block | length }}", TALK, {}),
    ("filter blocks", "{% filter upper %}abc {{ messages[0].role }}{% endfilter %}", TALK, {}),
    ("whitespace", "a\n  {%- if true %}\n  b\n    {% endif -%}\n  c\n{# note #}\n  {{- ' d' }}\n  {{ 'e' -}}\n  f\n{%+ if true %}g{% endif +%}\nh\n", TALK, {}),
    ("last newline", "a\n\n", TALK, {}),
    ("raw", "{% raw %}{{ not rendered }}{% endraw %}", TALK, {}),
    ("generation", "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}\n{% else %}{{ m.content }}{% endif %}{% endfor %}", TALK, {}),
    ("generation with spaces", "a\n  {%- generation -%}\n  b\n  {%- endgeneration -%}\nc{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", TALK, {}),
    ("special tokens", "{{ bos_token }}{{ eos_token + '!' }}{{ pad_token is defined }}", TALK, {}),
    ("slices", "{% set rest = messages[1:] %}{{ rest | length }}{{ messages[-1].role }}{{ messages[::-1][0].role }}{{ 'abcdef'[1:4] }}{{ 'abcdef'[:-2] }}{{ 'abcdef'[-2:] }}{{ messages[:2] | length }}{{ 'abcdef'[::-1] }}", TALK, {}),
    ("tests", "{{ x is defined }}{{ x is not defined }}{{ messages is sequence }}{{ messages[0] is mapping }}{{ messages[0].content is string }}{{ none is none }}{{ 1 is number }}{{ true is boolean }}{{ messages is iterable }}{{ 'a' is iterable }}{{ none is iterable }}{{ nope is iterable }}{{ 1 is iterable }}{{ {} is iterable }}{{ messages[0].content is not none }}{{ true is true }}{{ false is false }}{{ 2 is even }}{{ 3 is odd }}{{ 1.5 is float }}{{ 1 is integer }}{{ 'a' is sequence }}{{ {} is sequence }}{{ x is undefined }}{{ 3 is eq 3 }}{{ 'a' is in 'abc' }}{{ 6 is divisibleby 3 }}{{ 'a' is lower }}{{ 'A' is upper }}", TALK, {}),
    ("string methods", "{% set s = messages[1].content %}{{ s.strip() }}|{{ s.lstrip() }}|{{ s.rstrip() }}|{{ s.upper() }}|{{ s.lower() }}|{{ 'aXbXc'.split('X') | join('+') }}|{{ 'aXbXc'.split('X')[-1] }}|{{ 'abc'.startswith('ab') }}|{{ 'abc'.endswith('bc') }}|{{ 'abc'.replace('b', '-') }}|{{ 'a b'.title() }}|{{ 'ab'.capitalize() }}|{{ 'xxaxx'.strip('x') }}|{{ '\\n\\na\\n'.lstrip('\\n') }}|{{ 'a,b,c'.split(',', 1) | join('+') }}|{{ 'a,b,c'.rsplit(',', 1) | join('+') }}|{{ 'a,b'.rsplit(',')[0] }}|{{ ','.join(['a', 'b']) }}|{{ 'abc'.find('c') }}|{{ 'aab'.count('a') }}|{{ 'a b  c'.split() | join('+') }}|{{ 'l1\\nl2'.splitlines() | join('+') }}|{{ 'abc'.isdigit() }}|{{ '12'.isdigit() }}|{{ 'ab'.isalpha() }}", TALK, {}),
    ("more string methods", "{{ 'pre-x'.removeprefix('pre-') }}|{{ 'x.py'.removesuffix('.py') }}|{{ 'x'.removesuffix('.py') }}|{{ 'abcb'.rfind('b') }}", TALK, {}),
    ("think parts", "{% for m in messages if m.role == 'assistant' %}{% set c = m.content %}{% if '</think>' in c %}{% set r = c.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}{% set c = c.split('</think>')[-1].lstrip('\\n') %}[{{ r }}]{{ c }}{% endif %}{% endfor %}", TALK, {}),
    ("reasoning", "{% for m in messages %}{% if m.reasoning_content is string %}({{ m.reasoning_content }}){% elif m.reasoning is defined and m.reasoning %}({{ m.reasoning }}){% endif %}{{ m.get('thinking', '-') }}{{ m.content }}{% endfor %}", CALLS, {}),
    ("tool calls", "{% for m in messages %}{% if m.tool_calls %}{% for call in m.tool_calls %}{% if call.function is defined %}{% set call = call.function %}{% endif %}<tool_call>\n{\"name\": \"{{ call.name }}\", \"arguments\": {{ call.arguments | tojson }}}\n</tool_call>{% endfor %}{% elif m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% endif %}{% endfor %}", CALLS, {}),
    ("argument by argument", "{% for m in messages if m.tool_calls %}{% for call in m.tool_calls %}{% for k, v in call.function.arguments.items() %}<{{ k }}>{{ v if v is string else v | tojson }}</{{ k }}>{% endfor %}{% for k, v in call.function.arguments | items %}{{ k }};{% endfor %}{% for k, v in call.function.arguments | dictsort %}{{ k }}{% endfor %}{% endfor %}{% endfor %}", CALLS, {}),
    ("tojson", "{{ tools | tojson }}\n{{ tools[0] | tojson(indent=4) }}\n{{ tools | tojson(indent=2, ensure_ascii=False) }}", TALK, {"tools": [TOOL]}),
    ("tojson in ascii", "{{ 'Zürich 😀 \\x7f' | tojson(ensure_ascii=True) }}{{ 'Zürich' | tojson(ensure_ascii=False) }}{{ {'ü': 1} | tojson(ensure_ascii=true) }}", TALK, {}),
    ("tojson sorted", "{{ {'b': 1, 'a': {'d': 1, 'c': 2}} | tojson(sort_keys=true) }}", TALK, {}),
    ("tojson with separators", "{{ {'b': [1, 2]} | tojson(separators=(',', ':')) }}{{ {'b': [1, 2]} | tojson(indent=1, separators=(',', ': ')) }}", TALK, {}),
    ("numbers in json", "{{ [1, 1.0, 0.1, 1e100, 1e-7, -3, true, none, '\\u2028', '/'] | tojson }}{{ {} | tojson }}{{ [] | tojson(indent=2) }}{{ {1: 2} | tojson }}", TALK, {}),
    ("python's lists and dictionaries", "{{ messages[0] }}{{ [1, none, true, 1.5, 1e20, 'a'] }}{{ {'k': {'n': none}} | string }}{{ [\"it's\", '\"', \"'\\\"\", 'a\\\\b\\n\\t\\r', 'é\\x7f\\x01\\xa0'] }}{{ [] }}{{ {} }}{{ {1: []} }}", TALK, {}),
    ("python's words", "{{ true }} {{ none }} {{ [1, none, true, 1.5] }} {{ 1.0 }} {{ 10 / 4 }} {{ 7 // 2 }} {{ 7 % 3 }} {{ 2 ** 3 }} {{ \"it's\" }}", TALK, {}),
    ("operators", "{{ 'a' ~ 1 ~ none }}{{ 'a' in 'cat' }}{{ 'z' not in 'cat' }}{{ 1 < 2 and not 2 < 1 or false }}{{ 'x' if false }}{{ (1, 2)[0] }}{{ [1] + [2] }}{{ 'ab' * 2 }}{{ 1 if 0 else 2 }}{{ 'role' in messages[0] }}{{ none or 'b' }}{{ '' or 'c' }}", TALK, {}),
    ("filters", "{{ messages | map(attribute='role') | join(', ') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | rejectattr('role', 'equalto', 'user') | map(attribute='role') | join }}{{ [3, 1, 2] | sort }}{{ [1, 2] | first }}{{ [1, 2] | last }}{{ 'a' | default('b') }}{{ nope | default('b') }}{{ none | default('c', true) }}{{ 'abc' | capitalize }}{{ 'a b' | replace(' ', '_') }}{{ '3' | int + 1 }}{{ 'abc' | list | join('-') }}{{ [1, 1, 2] | unique | list }}{{ 'abc' | reverse }}{{ [1, 2] | sum }}{{ 'x' | safe }}{{ 'line\\nline' | indent(2) }}{{ 3.7 | int }}{{ 2 | float }}{{ -1 | abs }}{{ [1, 2, 3] | max }}{{ 'a b c' | title }}{{ 'aé' | count }}{{ ['a', 'b'] | join }}{{ '%s-%s' | format('a', 1) }}{{ ' x ' | trim }}{{ messages | selectattr('tool_calls', 'defined') | list | length }}", TALK, {}),
    ("null content", "{% for m in messages %}[{{ m.content }}{{ m['content'] | trim }}{{ m.content ~ '' }}{{ m.content + '' }}{{ m.content.strip() }}{{ 'x' in m.content }}{{ m.content | length }}{{ m.content is string }}{{ m.content or '-' }}{{ m.reasoning_content is not none }}]{% endfor %}", NULL_CALLS, {}),
    ("absent content", "{% for m in messages %}[{{ m.content }}{{ m.content + '' }}{{ m.content is defined }}]{% endfor %}", BARE_CALLS, {}),
    ("null content that is tested", "{% for m in messages %}{% if m['content'] is none %}calls{% else %}{{ m['content'] }}{% endif %}{% endfor %}", NULL_CALLS, {}),
    ("null content that is tested by a name", "{% for m in messages %}{% set content = m.content %}{% if content != None %}{{ content }}{% endif %}{% endfor %}", NULL_CALLS, {}),
    ("null content that is tested and printed", "{% for m in messages %}{{ m.content is not none }}{{ m.content }}{% endfor %}", NULL_CALLS, {}),
    ("null content without calls", "{{ messages[0].content }}", [{"role": "user", "content": None}], {}),
    ("dictionaries", "{% set d = {'a': 1, 'b': none} %}{{ d.get('a') }}{{ d.get('z') }}{{ d.get('z', 3) }}{{ d.keys() | join }}{{ d.values() | list }}{{ d['b'] is none }}{{ d.z is defined }}{% for k in d %}{{ k }}{% endfor %}{{ dict(a=1).a }}{{ d | length }}{{ dict(d, c=2) | tojson }}", TALK, {}),
    ("unpacking", "{% for a, b in [(1, 2), (3, 4)] %}{{ a }}{{ b }}{% endfor %}{% set a, b = 1, 2 %}{{ a }}{{ b }}{% for i in range(3) %}{{ i }}{% endfor %}{% for i in range(5, 0, -2) %}{{ i }}{% endfor %}{% for m in messages | reverse %}{{ m.role }}{% endfor %}{% for m in messages[::-1] %}{{ m.role }}{% endfor %}", TALK, {}),
    ("content parts", "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}", [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], {}),
    ("undefined", "{{ nope }}{{ messages[0].nope }}{% if nope %}x{% endif %}{% if not messages[0].nope %}y{% endif %}{{ nope is defined and nope }}{% for x in nope %}z{% endfor %}{{ nope | default('d') }}{{ messages[9] is defined }}", TALK, {}),
    ("arguments", "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{{ reasoning_effort | default('medium') }}{% if tools %}T{% endif %}{% if documents is not none %}D{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}", TALK, {"enable_thinking": False}),
    ("an escaped text", "{{ messages[1].content }}{{ '<&>' | e }}", TALK, {}),
    ("a refusal", "{% for m in messages %}{% if m.role == 'user' %}{{ raise_exception('Roles must alternate: ' ~ m.role) }}{% endif %}{% endfor %}", TALK, {}),
    ("an unknown attribute of nothing", "{{ nope.deeper }}", TALK, {}),
    ("do and loop scope", "{% set x = 1 %}{% for m in messages %}{% set x = 2 %}{% endfor %}{{ x }}{% if true %}{% set x = 3 %}{% endif %}{{ x }}{% with y = 4 %}{{ y }}{% endwith %}", TALK, {}),
    ("cycle and changed", "{% for m in messages %}{{ loop.cycle('a', 'b') }}{{ loop.depth }}{% if loop.changed(m.role) %}!{% endif %}{% endfor %}", TALK, {}),
    ("line breaks of Windows", "a\r\n{% if true %}\r\nb{% endif %}\r\n{{ messages[0].content }}", TALK, {}),
    ("ends of lines in texts", "{{ 'a\\n' }}{{- '\\t' -}}{{ \"\\\"\" }}{{ 'é\\u00e9' }}{{ '\\\\' }}", TALK, {}),
]

# Conversations that each published template renders: messages and arguments.
CONVERSATIONS = {
    "one turn": (TALK[1:2], {}),
    "turns": (TALK, {}),
    "turns without a prompt": (TALK, {"add_generation_prompt": False}),
    "no thinking": (TALK[:2], {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}),
    "thinking": (TALK[:2], {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
    "tools": (TALK[:2], {"tools": [TOOL]}),
    "calls": (CALLS, {"tools": [TOOL]}),
    "calls with null content": (NULL_CALLS, {"tools": [TOOL]}),
    "calls without content": (BARE_CALLS, {"tools": [TOOL]}),
    "calls without a prompt": (CALLS[:-1], {"tools": [TOOL], "add_generation_prompt": False}),
}
# Dates would change the output, so this macro returns the format in place of a date.
DATE = "{% macro strftime_now(format) %}{{ format }}{% endmacro %}"


TESTS_CONTENT = re.compile(r"(?<!\w)content['\"\])\s]*(?:is\s+(?:not\s+)?|[!=]=\s*)none", re.I)


def with_content(template, messages):
    """Clients omit content, or send null, beside tool calls. vLLM passes an empty text to the template. transformers
    passes null, on which only templates that test content for none rely. The others print `None` or fail."""
    if TESTS_CONTENT.search(template):
        return [{"content": None, **message} for message in messages]
    calls = lambda message: message.get("tool_calls") and message.get("content") is None
    return [{**message, "content": ""} if calls(message) else message for message in messages]


def reference(template, messages, arguments, special):
    messages = with_content(template, messages)
    names = {**special, "tools": None, "documents": None, "add_generation_prompt": True, **arguments, "messages": messages}
    try:
        return compile_template(template).render(**names)
    except Exception:  # The renderer must reject the template, with any message.
        return None


def cases():
    for name, template, messages, arguments in CASES:
        expected = reference(template, messages, arguments, SPECIAL)
        yield {"name": name, "template": template, "messages": messages, "arguments": arguments, "expected": expected}


def published():
    folder, rendered = pathlib.Path(__file__).with_name("published"), {}
    for path in sorted(folder.glob("*.jinja")):
        template = DATE + path.read_text(encoding="utf-8")
        texts = {name: reference(template, *talk, SPECIAL) for name, talk in CONVERSATIONS.items()}
        rendered[path.stem] = texts
    talks = {name: {"messages": talk[0], "arguments": talk[1]} for name, talk in CONVERSATIONS.items()}
    return {"prefix": DATE, "conversations": talks, "rendered": rendered}


def compare(folder, render):
    counts = [0, 0, 0]
    for path in sorted(pathlib.Path(folder).glob("*.jinja")):
        with tempfile.TemporaryDirectory() as model:
            shutil.copy(path, pathlib.Path(model) / "chat_template.jinja")
            (pathlib.Path(model) / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
            for name, (messages, arguments) in CONVERSATIONS.items():
                expected = reference(path.read_text(encoding="utf-8"), messages, arguments, SPECIAL)
                request = json.dumps({"messages": messages, "arguments": arguments})
                ran = subprocess.run([render, model], input=request.encode(), capture_output=True)
                text = ran.stdout.decode() if ran.returncode == 0 else None
                is_same = text == expected
                counts[0 if not is_same else 1 if expected is not None else 2] += 1
                if not is_same:
                    print(f"{path.name}: {name}: differs\n  {expected!r}\n  {text!r}\n  {ran.stderr.decode().strip()}")
    print(f"{datetime.date.today()}: {counts[1]} rendered alike, {counts[2]} refused by both, {counts[0]} differ")
    return counts[0] == 0


def main():
    if len(sys.argv) == 3:
        sys.exit(0 if compare(sys.argv[1], sys.argv[2]) else 1)
    for name, value in (("cases.json", list(cases())), ("published.json", published())):
        path = pathlib.Path(__file__).with_name(name)
        text = json.dumps(value, ensure_ascii=False, indent=1) + "\n"
        if sys.argv[1:] == ["--write"]:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            sys.exit(f"{name} differs from what transformers renders: run with --write")


main()
