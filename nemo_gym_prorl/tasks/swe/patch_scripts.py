# SPDX-FileCopyrightText: Copyright (c) 2026 the nemo-gym-prorl authors
# SPDX-License-Identifier: Apache-2.0
"""Shell scripts that prepare, list and change a repository inside a sandbox.

The arguments of scripts with :data:`SCRIPT_HEADER` are the work folder, the repository, and then the script's own.
"""

SCRIPT_HEADER = """\
set -eu
work=$1 repo=$2; shift 2
export HOME="$work" LC_ALL=C GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL="$work/.gitconfig" GIT_ATTR_NOSYSTEM=1
export GIT_TERMINAL_PROMPT=0 GIT_OPTIONAL_LOCKS=0
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_EXTERNAL_DIFF GIT_CONFIG_COUNT || :
mkdir -p "$work"
printf '[safe]\\ndirectory = *\\n[core]\\nhooksPath = /dev/null\\nautocrlf = false\\n' > "$work/.gitconfig"
refuse() { printf '%s\\n' "$2"; exit "$1"; }
"""
"""First lines of the scripts: isolate git from system, user and environment configuration."""

RAW_ATTRIBUTES = "* -text -filter -ident -working-tree-encoding !diff\n"
"""git attributes that disable all conversions of contents; they override the repository's ``.gitattributes``."""

PREPARE = (
    SCRIPT_HEADER
    + """\
base=$1; shift
command -v git > /dev/null || refuse 41 "the image has no git"
[ -d "$repo" ] || refuse 41 "the image has no folder $repo"
cd "$repo"
[ "$(git rev-parse --show-toplevel 2> /dev/null)" = "$(pwd -P)" ] || refuse 41 "$repo is no git repository"
git cat-file -e 'HEAD^{tree}' 2> /dev/null || refuse 41 "the repository in $repo has no commit"
if [ -n "$base" ]; then
    git cat-file -e "$base^{commit}" 2> /dev/null || refuse 42 "the repository in $repo has no commit $base"
    git merge-base --is-ancestor "$base" HEAD || refuse 42 "$base is not at or before HEAD of $repo"
fi
count=0
for path; do
    count=$((count + 1))
    [ -e "$path" ] || [ -L "$path" ] || continue
    mkdir -p "$work/hidden/$count"
    mv "$path" "$work/hidden/$count/it"
done
tag=$(git describe --tags --abbrev=0 HEAD 2> /dev/null || :)
tree=$(git rev-parse 'HEAD^{tree}')
git init -q --template= "$work/new"
{ echo "$tree"; git ls-tree -r -t "$tree" | awk '$2 != "commit" { print $3 }'; } |
    git pack-objects -q "$work/new/.git/objects/pack/pack" > /dev/null
find . -name .git -prune -exec rm -rf {} +
mv "$work/new/.git" .git
mkdir -p .git/info
cat "$work/attributes" > .git/info/attributes
cat "$work/junk" > .git/info/exclude
git config gc.auto 0
git config user.name agent
git config user.email agent@localhost
git read-tree "$tree"
git add -A .
tree=$(git write-tree)
commit=$(echo base | GIT_AUTHOR_NAME=base GIT_AUTHOR_EMAIL=base GIT_AUTHOR_DATE='@0 +0000' GIT_COMMITTER_NAME=base \
GIT_COMMITTER_EMAIL=base GIT_COMMITTER_DATE='@0 +0000' git commit-tree "$tree")
git update-ref HEAD "$commit"
[ -z "$tag" ] || git update-ref "refs/tags/$tag" "$commit"
rm -rf .git/logs
[ "$(stat -c %u .)" = "$(id -u)" ] || chown -R --reference=. .git || :
[ ! -s "$work/test.patch" ] || git apply --cached --check --whitespace=nowarn "$work/test.patch" 2>&1 || exit 43
git ls-files -s > "$work/listing"
echo "commit $commit"
"""
)

LIST_FILES = (
    SCRIPT_HEADER
    + """\
cd "$repo"
export GIT_DIR="$work/git" GIT_WORK_TREE="$repo"
git init -q --template=
mkdir -p "$GIT_DIR/info" "$GIT_DIR/objects/info"
cat "$work/attributes" > "$GIT_DIR/info/attributes"
cat "$work/junk" > "$GIT_DIR/info/exclude"
[ -L .git ] || [ ! -d .git/objects ] || echo "$repo/.git/objects" > "$GIT_DIR/objects/info/alternates"
find . -mindepth 2 -name .git -prune -exec rm -rf {} +
git update-index --index-info < "$work/listing"
: > "$work/large"
find . -path ./.git -prune -o -type f -size +"$1"k -exec sh -c 'for path; do
    git ls-files --error-unmatch -- ":(literal)$path" > /dev/null 2>&1 && continue
    printf "%s\\n" "$path" >> "$0"; rm -f "$path"
done' "$work/large" {} +
git -c core.compression=0 -c core.looseCompression=0 -c core.symlinks=true -c core.fileMode=true add -A .
git ls-files -s > "$work/after"
"""
)

READ_CONTENTS = (
    SCRIPT_HEADER
    + """\
cd "$repo"
export GIT_DIR="$work/git"
git cat-file --batch < "$work/wanted" | head -c "$1" > "$work/contents"
"""
)

_SHOW_HIDDEN = """\
count=0
for path; do
    count=$((count + 1))
    [ -e "$work/hidden/$count" ] || continue
    rm -rf "$path"
    mv "$work/hidden/$count/it" "$path"
done
"""

APPLY_SOLUTION = (
    SCRIPT_HEADER
    + """\
cd "$repo"
commit=$1 kept=$2
shift 2
base64 -d "$work/stream" | git fast-import --quiet
git diff --binary --no-ext-diff --no-textconv --no-renames --no-color "$commit" refs/prorl/solution > "$work/patch"
git read-tree --reset -u refs/prorl/applied
mkdir "$work/objects"
[ ! -s "$work/test.patch" ] || GIT_OBJECT_DIRECTORY="$work/objects" GIT_ALTERNATE_OBJECT_DIRECTORIES=.git/objects \
    git apply --index --whitespace=nowarn "$work/test.patch"
git ls-files -s > "$work/applied"
if [ "$kept" ]; then
    mkdir -p "$work/kept/tests" "$work/hidden"
    xargs -0 -r sh -c 'for path; do
        [ ! -e "$path" ] && [ ! -L "$path" ] || cp -a --parents "$path" "$0"
    done' "$work/kept/tests" < "$work/tests"
    mv "$work/hidden" "$work/kept/hidden"
    tar -C "$work/kept" -cf - . | base64 > "$work/kept.tar"
    rm -rf "$work/kept"
    git read-tree --reset -u refs/prorl/applied
fi
git read-tree "$commit"
git update-ref -d refs/prorl/solution
git update-ref -d refs/prorl/applied
rm -rf "$work/objects" "$work/test.patch"  # leave no copy of the hidden tests
"""
    + _SHOW_HIDDEN
)
"""Arguments after the repository: base commit; a text, not empty to store tests in ``kept.tar``; hidden paths."""

APPLY_TESTS = (
    SCRIPT_HEADER
    + """\
cd "$repo"
mkdir "$work/kept"
base64 -d "$work/kept.tar" | tar -C "$work/kept" -xf -
mv "$work/kept/hidden" "$work/hidden"
xargs -0 -r rm -rf < "$work/tests"
cp -a "$work/kept/tests/." .
rm -rf "$work/kept" "$work/kept.tar"
"""
    + _SHOW_HIDDEN
)

READ_ENVIRONMENT = """\
cd "$2" && env > "$1/before"
{ . "$1/setup"; } > /dev/null 2>&1
env > "$1/setup-done"
{ command -v python || command -v python3; } > /dev/null || exit 0
"$(command -v python || command -v python3)" - "$2" > "$1/modules" 2> /dev/null <<'END'
import os, sys
real = os.path.realpath
repo, prefix = real(sys.argv[1]), real(sys.prefix)
for entry in filter(None, sys.path):
    inside = os.path.relpath(real(entry), repo)
    if not inside.startswith("..") and not real(entry).startswith(prefix + "/"):
        print("folder " + ("" if inside == "." else inside))
    elif os.path.isdir(entry):
        for name in os.listdir(entry):
            print("module " + name.partition(".")[0])
END
"""

ACTIVATE_ENVIRONMENT = """\
prorl_setup() {
if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate && conda activate testbed
elif [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi
}
prorl_setup
unset -f prorl_setup
"""
"""Script that activates the datasets' conda or virtual environment, if the image has one. A function hides the
positional arguments, which conda's script would read.
"""
