"""Acceptance test of the image `pd-relay`, run where its architecture is this machine's.

It is not root, writes nothing, and the relay serves: without a worker it says which roles are missing.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

assert os.getuid() == 65534, f"it runs as user {os.getuid()}"
command = [sys.executable, "-m", "pd_relay"]
told = subprocess.run([*command, "--port=x"], capture_output=True, text=True, check=False)
assert told.returncode == 2, told
assert "argument --port" in told.stderr, told.stderr

relay = subprocess.Popen([*command, "--port=30020"], stdout=subprocess.PIPE, text=True)
missing = None
for _ in range(100):
    time.sleep(0.1)
    try:
        urllib.request.urlopen("http://127.0.0.1:30020/health", timeout=5)
    except urllib.error.HTTPError as error:
        missing = (error.code, json.load(error)["missing"])
        break
    except OSError:
        assert relay.poll() is None, f"it ended with status {relay.returncode}"
assert missing == (503, ["prefill", "decode"]), missing
relay.terminate()
assert relay.wait(timeout=20) == 0, relay.returncode
assert json.loads(relay.stdout.read().splitlines()[-1]) == {"event": "stopped"}
