#!/bin/bash
if diff /tests/expected.txt "$(cat /tests/path.txt)"; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
