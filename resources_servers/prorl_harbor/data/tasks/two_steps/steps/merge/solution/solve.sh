#!/bin/bash
sort -n first.txt second.txt > all.txt
