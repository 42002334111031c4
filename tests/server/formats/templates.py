"""Chat templates with call syntaxes that no published template has, or whose published templates are not at hand."""

from __future__ import annotations

USER = "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}</user>\n"
SYSTEM = "{% elif m.role == 'system' %}<system>{{ m.content }}</system>\n"
RESULT = "{% elif m.role == 'tool' %}<result>{{ m.content }}</result>\n"
TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"


def template(turn: str, lead: str = "<model>", end: str = "</s>\n") -> str:
    """Return a template that renders an assistant's turn `m` with `turn`, between `lead` and `end`."""
    return (
        f"{TOOLS}{USER}{SYSTEM}{RESULT}{{% else %}}{lead}{turn}{end}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{lead}{{% endif %}}"
    )


def each(call: str, between: str = "") -> str:
    """Render `call` once per tool call; `f` is the call's function."""
    separator = f"{{% if not loop.last %}}{between}{{% endif %}}" if between else ""
    return f"{{% for c in m.tool_calls or [] %}}{{% set f = c.function %}}{call}{separator}{{% endfor %}}"


def section(begin: str, calls: str, end: str) -> str:
    return f"{{{{ m.content }}}}{{% if m.tool_calls %}}{begin}{calls}{end}{{% endif %}}"


THOUGHT = "{% if m.reasoning_content %}<reason>{{ m.reasoning_content }}</reason>{% endif %}"
HARMONY = (
    "{% for m in messages %}{% if m.role in ('user', 'system') %}<|start|>{{ m.role }}<|message|>"
    "{% if tools and loop.first %}namespace functions {{ tools | tojson }}{% endif %}{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% else %}{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.tool_calls %}<|start|>assistant to={{ 'functions.' + m.tool_calls[0].function.name }}"
    "<|channel|>commentary json"
    "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ARGUMENTS = "{% for k, v in f.arguments.items() %}"
NEXT = "{% if not loop.last %}, {% endif %}"

OWN = {
    "openai_list": template(section("<calls>", "{{ m.tool_calls | tojson }}", "</calls>")),
    "json_in_string": template(
        section("", each('\n@call {"fn": "{{ f.name }}", "args": {{ f.arguments | tojson | tojson }}}'), "")
    ),
    "element_names": template(
        section(
            "<invoke_all>",
            each(
                f"<{{{{ f.name }}}}>{ARGUMENTS}<{{{{ k }}}}>{{{{ v if v is string else v | tojson }}}}</{{{{ k }}}}>"
                "{% endfor %}</{{ f.name }}>"
            ),
            "</invoke_all>",
        )
    ),
    "escaped_attributes": template(
        section(
            "",
            each(
                f'\n<call fn="{{{{ f.name }}}}" ref="{{{{ c.id }}}}">{ARGUMENTS}<arg k="{{{{ k }}}}">'
                "{{ (v if v is string else v | tojson) | e }}</arg>{% endfor %}</call>"
            ),
            "",
        )
    ),
    "python_dict": template(section("<|act|>", each("{{ f.name }} WITH {{ f.arguments }}", " THEN "), "<|done|>")),
    "lines": template(
        section(
            "",
            each(
                f"{{{{ '\\nCALL ' }}}}{{{{ f.name }}}}\n"
                f"{ARGUMENTS}- {{{{ k }}}} := {{{{ v | tojson }}}}\n{{% endfor %}}END"
            ),
            "",
        )
    ),
    "harmony": HARMONY,
    "arguments_first": template(
        section("[ACTIONS]", each('{"input": {{ f.arguments | tojson }}, "tool": "{{ f.name }}"}', "; "), "")
    ),
    "id_has_the_name": template(
        section("<|calls|>", each("<|call|>{{ c.id }}<|args|>{{ f.arguments | tojson }}<|end_call|>"), "<|end_calls|>")
    ),
    "bare_python": template(
        section(
            "[", each(f"{{{{ f.name }}}}({ARGUMENTS}{{{{ k }}}}={{{{ v | tojson }}}}{NEXT}{{% endfor %}})", ", "), "]"
        )
    ),
    "fenced": template(
        section(
            "", each('\n```tool_code\n{{ {"name": f.name, "arguments": f.arguments} | tojson(indent=2) }}\n```'), ""
        ),
        lead="### Assistant:\n",
        end="\n\n",
    ),
    "sorted": template(section("", each("<fn={{ f.name }}>{{ f.arguments | tojson(sort_keys=true) }}</fn>"), "")),
    "attributes": template(
        section(
            "", each(f'<call name="{{{{ f.name }}}}"{ARGUMENTS} {{{{ k }}}}={{{{ v | tojson }}}}{{% endfor %}}/>'), ""
        )
    ),
    "method": template(
        section("", each("<|run|>{{ f.name }}.call({{ f.arguments | tojson }})"), "<|eom|>"), end="<|eot|>"
    ),
    "two_lines": template(
        section("", each("{{ '\\ntool: ' }}{{ f.name }}{{ '\\nargs: ' }}{{ f.arguments | tojson }}{{ '\\n' }}"), "")
    ),
    "only_the_first": template(
        "{{ m.content }}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
        "<fc>{{ f.name }}::{{ f.arguments | tojson }}</fc>{% endif %}"
    ),
    "thinking": template(THOUGHT + section("<ops>", each("{{ f.name }}{{ f.arguments | tojson }}", "\n"), "</ops>")),
}
