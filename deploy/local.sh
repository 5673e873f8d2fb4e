#!/bin/sh
# Run a server, a load generator and Prometheus on this machine without containers, and Grafana if it is installed.
#   deploy/local.sh [FLAGS OF quire serve]      e.g. deploy/local.sh ./Qwen3-0.6B --weights q8
# Ctrl-C stops everything and deletes the recorded metrics. Requires quire and prometheus on PATH (Debian: apt install
# prometheus).
set -eu
deploy=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)

for command in quire prometheus; do
    command -v "$command" >/dev/null || { echo "deploy/local.sh: $command is not on PATH" >&2; exit 2; }
done

work=$(mktemp -d)
children=
finish() {
    trap - EXIT INT TERM
    # Word splitting is intended: $children is a list of process ids.
    # shellcheck disable=SC2086
    [ -z "$children" ] || kill $children 2>/dev/null || true
    wait
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

start() {
    "$@" &
    children="$children $!"
}

wait_for() { # URL: wait until it answers; exit if the most recently started child ends first
    until python3 -ISc "from urllib.request import urlopen; urlopen('$1', timeout=2)" 2>/dev/null; do
        kill -0 "$!" 2>/dev/null || { echo "deploy/local.sh: the process behind $1 ended" >&2; exit 1; }
        sleep 0.2
    done
}

generate_load() { # runs of 300 s, because a run keeps a record of each of its requests in memory
    trap 'kill "$run" 2>/dev/null; exit' TERM
    while :; do
        quire loadtest --base-url 127.0.0.1:7070 --dataset-name prefix_repetition --prefix-repetition-prefix-len 256 \
            --prefix-repetition-suffix-len 128 --prefix-repetition-output-len 96 --ignore-eos --request-rate 6 \
            --burstiness 0.3 --cancel-rate 0.1 --duration 300 --disable-tqdm >/dev/null &
        run=$!
        wait "$run" || sleep 5
    done
}

start quire serve "$@"
wait_for http://127.0.0.1:7071/readyz

cp "$deploy"/prometheus/*.yml "$work"
sed -i 's/quire:7071/127.0.0.1:7071/' "$work/prometheus.yml"
start prometheus --config.file="$work/prometheus.yml" --storage.tsdb.path="$work/prometheus" \
    --web.listen-address=127.0.0.1:9090 --log.level=warn
wait_for http://127.0.0.1:9090/-/ready

start generate_load

echo "status page  http://127.0.0.1:7071/"
echo "Prometheus   http://127.0.0.1:9090/alerts"
if command -v grafana-server >/dev/null; then
    export GF_PATHS_DATA="$work/grafana" GF_PATHS_LOGS="$work/grafana" GF_LOG_LEVEL=warn
    export GF_PATHS_PROVISIONING="$deploy/grafana/provisioning" QUIRE_DASHBOARDS="$deploy/grafana/dashboards"
    export GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH="$QUIRE_DASHBOARDS/quire.json"
    export GF_SERVER_HTTP_ADDR=127.0.0.1 GF_SERVER_HTTP_PORT=3000 PROMETHEUS_URL=http://127.0.0.1:9090
    export GF_AUTH_ANONYMOUS_ENABLED=true GF_AUTH_DISABLE_LOGIN_FORM=true GF_ANALYTICS_REPORTING_ENABLED=false
    start grafana-server --homepath "${GRAFANA_HOME:-/usr/share/grafana}"
    echo "Grafana      http://127.0.0.1:3000/"
else
    echo "Grafana      not installed; import deploy/grafana/dashboards/*.json into your own Grafana"
fi
wait
