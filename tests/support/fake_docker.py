#!/usr/bin/env python3
"""Stands in for the docker client in tests of images/build; real builds are made by `make images` and in CI.

In the folder FAKE_DOCKER: `calls` records each call, `images.json` is what the engine has (name -> id), `context`
is the context of the last build, `test` what the last container was given on stdin. Files that a test puts there
decide what happens: `silent` (no engine answers), `version` (the client's), `fail-COMMAND` (its exit status).
"""

import json
import os
import shutil
import sys
from pathlib import Path

state = Path(os.environ["FAKE_DOCKER"])
command, *rest = sys.argv[1:]
with (state / "calls").open("a") as calls:
    calls.write(json.dumps([command, *rest]) + "\n")
images_file = state / "images.json"
images = json.loads(images_file.read_text()) if images_file.exists() else {}

if (state / "silent").exists():
    sys.exit("Cannot connect to the Docker daemon.")
if command == "version":
    version = state / "version"
    print(version.read_text() if version.exists() else "20.10.24", "20.10.24")
if command == "buildx":
    sys.exit("docker: 'buildx' is not a docker command.")
if command == "image":
    name = rest[-1]
    if name not in images:
        sys.exit(f"Error: No such image: {name}")
    print(images[name])
if command == "build":
    context = Path(rest[-1])
    shutil.rmtree(state / "context", ignore_errors=True)
    shutil.copytree(context, state / "context", symlinks=True)
if command == "run":
    (state / "test").write_text(sys.stdin.read())

failing = state / f"fail-{command}"
if failing.exists():
    print(f"{command} says why", file=sys.stderr)
    sys.exit(int(failing.read_text()))

if command == "build":
    (id_file,) = (word.partition("=")[2] for word in rest if word.startswith("--iidfile="))
    Path(id_file).write_text(f"sha256:{len(images) + 1}")
if command == "tag":
    images_file.write_text(json.dumps(images | {rest[1]: rest[0]}))
