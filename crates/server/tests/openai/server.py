"""Starts and ends `kvarena-server --serve`, and reads its metrics. Needs only Python's standard library."""

import signal
import subprocess
import urllib.request


class Server:
    """A server at a free port of the loopback. As a context manager it ends the server by SIGTERM and checks the exit."""

    def __init__(self, program, *arguments, wrap=(), **options):
        command = [*wrap, program, "--serve", "127.0.0.1:0", *arguments]
        self.asked = False
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        first = self.process.stdout.readline()
        if not first.startswith("serving "):
            raise RuntimeError(f"no server: {first!r}, {self.process.communicate()[1]}")
        _, self.model, _, self.url = first.split()

    def get(self, path):
        with urllib.request.urlopen(self.url + path) as answer:
            return answer.read().decode()

    def metrics(self):
        """Returns every sample by its name with labels."""
        lines = (line for line in self.get("/metrics").splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def ask_to_end(self):
        """Sends SIGTERM once: a second signal would end the server before its answers are complete."""
        if not self.asked and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.asked = True

    def end(self):
        """Ends the server and returns its output. The exit code must be 0, after the audit."""
        self.ask_to_end()
        out, err = self.process.communicate()
        if self.process.returncode != 0 or "verified: " not in out:
            raise RuntimeError(f"it ended with {self.process.returncode}: {out!r}, {err}")
        self.audit, self.report = out.strip(), err
        return self.audit

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.end()
        else:
            self.process.kill()
            print(self.process.communicate()[1])
