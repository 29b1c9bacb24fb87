#!/bin/bash
# Builds a workspace with six agents, has their delegation profiles written, restricts whom one of them may ask, sends it two
# messages, and shows why it chose whom it chose. docs/agents.md is about it. Needs curl, and a service that runs:
#
#   TOKEN=$(target/debug/reconvene token --workspace demo --role operator) docs/agents.sh [ADDRESS] [SLUG]
set -euo pipefail
api=${1:-http://127.0.0.1:8080}/api
slug=${2:-mill}

# call METHOD PATH [CURL'S ARGUMENTS]: prints the answer; ends the script if it is a refusal.
call() {
    local method=$1 path=$2 answer
    shift 2
    if ! answer=$(curl -sS --fail-with-body -X "$method" "$api$path" -H 'Content-Type: application/json' "${login[@]}" "$@"); then
        echo "$method $path: $answer" >&2
        exit 1
    fi
    printf '%s\n' "$answer"
}

# texts NAME: the strings of this name in the JSON of standard input, in order.
texts() {
    { grep -oE "\"$1\":\"(\\\\.|[^\"\\\\])*\"" || true; } | sed -E 's/^"[^"]*":"(.*)"$/\1/; s/\\"/"/g' |
        while IFS= read -r text; do printf '%b\n' "$text"; done
}

# one NAME JSON: the first of them.
one() {
    texts "$1" <<<"$2" | sed -n 1p
}

echo "# A workspace, with an admin who logs in and makes a key"
login=(-H "Authorization: Bearer ${TOKEN:?set it to the token of an operator}")
password=$(head -c 18 /dev/urandom | base64)
call POST /admin/workspaces -d '{"slug": "'"$slug"'", "name": "The old mill", "admin": {"username": "ada", "password": "'"$password"'"}}' >/dev/null
cookies=$(mktemp)
trap 'rm -f "$cookies"' EXIT
login=(-b "$cookies" -c "$cookies")
session=$(call POST /auth/login -d '{"workspace": "'"$slug"'", "username": "ada", "password": "'"$password"'"}')
login+=(-H "X-CSRF-Token: $(one csrf_token "$session")")
key=$(call POST /api-keys -d '{"name": "docs/agents.sh", "role": "admin"}')
login=(-H "Authorization: Bearer $(one key "$key")")
call GET /auth/me | texts subject

echo
echo "# Five agents beside the one that the workspace was born with"
agent() {
    one id "$(call POST /agents -d '{"name": "'"$1"'", "instructions": "'"$2"'", "config": {"auto_delegate": false}}')"
}
researcher=$(agent Researcher 'You research facts and figures. Mark each that you are not sure of.')
writer=$(agent Writer 'You write texts: letters, posters, announcements. Use only the facts that you are given.')
agent Reviewer 'You review texts and plans. Say what is wrong, worst first.' >/dev/null
agent Translator 'You translate texts into other languages. Keep their tone.' >/dev/null
lead=$(call POST /agents -d '{"name": "Lead", "instructions": "You lead a small team. Hand each part to the agent that suits it best."}')
call GET /agents | texts name

echo
echo "# Their profiles, written by the model"
job=$(call POST /agents/delegation-profiles/backfill)
until [[ $(one status "$job") == completed ]]; do
    sleep 0.1
    job=$(call GET "/agents/delegation-profiles/backfill/$(one id "$job")")
done
grep -oE '"(generated|skipped|failed)":[0-9]+' <<<"$job"

echo
echo "# A delegate tool that reaches two of them, for Lead"
call POST /configured-tools -d '{"name": "delegate_to_desk", "base_tool": "delegate_tasks", "description": "Hand facts and texts to the desk.",
  "bindings": {"allowed_agent_group_ids": "'"$researcher, $writer"'"}}' | texts name
lead=$(call GET "/agents/$(one id "$lead")")
revision=$(grep -oE '"revision":[0-9]+' <<<"$lead" | grep -oE '[0-9]+')
lead=$(one id "$lead")
call PATCH "/agents/$lead" -H "If-Match: \"$revision\"" -d '{"tools": ["delegate_to_desk"]}' >/dev/null
call POST "/agents/$lead/publish" >/dev/null

# ask MESSAGE: sends it to Lead, waits for the end, and sets `task`.
ask() {
    echo
    echo "# A message: $(printf '%b' "$1" | tr '\n' ' ')"
    task=$(one task_id "$(call POST /chat/message -d '{"agent_group_id": "'"$lead"'", "message": "'"$1"'"}')")
    until [[ $(one status "$(call GET "/tasks/$task")") =~ ^(completed|failed|stopped)$ ]]; do sleep 0.1; done
    call GET "/tasks/$task" | texts output
}

ask 'We open the old mill to visitors:\n- research how the mill was built\n- write a poster for the opening'
log=$(call GET "/admin/decision-logs/$task.1")
rest=${log#*\"name\":\"roster\"}
roster=${rest%%\"name\":\"tools\"*}
tools=${rest#*\"name\":\"tools\"}
echo
echo "# Why? What Lead knew of the others ..."
texts text <<<"${roster#*\"entries\"}"
echo
echo "# ... of its tool ..."
texts text <<<"${tools#*\"entries\"}" | grep delegate_to_desk
echo
echo "# ... and what it decided"
answer=${log#*\"answer\":}
one text "$answer"
texts arguments <<<"$answer"

ask 'One more thing:\n- translate the poster into French\n- write a letter to the town'
echo
echo "# Why not? What its call was told"
call GET "/tasks/$task/feed" | grep -oE '"kind":"tool_result".*' | texts text | sed -n 1p
