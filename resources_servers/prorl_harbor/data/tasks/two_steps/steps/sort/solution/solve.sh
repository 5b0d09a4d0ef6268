#!/bin/bash
sort -n -o first.txt first.txt
