"""Command line of studies: what is there to be studied."""

from __future__ import annotations

import json

import click

from ddtree.cli_options import json_option
from ddtree.cli_study_replay import record_command, replay_command, report_command
from ddtree.cli_study_routing import routing_command
from ddtree.errors import UsageError
from ddtree.shapes import SHAPES


@click.group("study", invoke_without_command=True)
@click.option("--shapes", is_flag=True, help="List the tree shapes, installed packages' included.")
@json_option
@click.pass_context
def study_group(context: click.Context, shapes: bool, as_json: bool) -> None:
    """Study draft trees: which shape, which budget?"""
    if context.invoked_subcommand is not None:
        if shapes or as_json:
            raise UsageError("study: --shapes and its --json stand alone, without a command")
        return
    if not shapes:
        raise UsageError("study: give --shapes, or a command; see --help")
    found = dict(SHAPES)
    width = max(map(len, found))
    lines = "\n".join(f"{name:{width}}  {text}" for name, text in found.items())
    click.echo(json.dumps({"shapes": found}, indent=1) if as_json else lines)


study_group.add_command(record_command)
study_group.add_command(replay_command)
study_group.add_command(report_command)
study_group.add_command(routing_command)
