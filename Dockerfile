# The service without a database: it needs DATABASE_URL. See compose.yaml.
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
# .sqlx/ stands in for the database that the SQL macros would ask.
ENV SQLX_OFFLINE=true
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    cargo build --release --locked && cp target/release/reconvene /reconvene

FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --home-dir /var/lib/reconvene --create-home reconvene
COPY --from=build /reconvene /usr/local/bin/reconvene
USER reconvene
WORKDIR /var/lib/reconvene
# Whatever its roles, a container tells of its health on 8080; one with the role api serves there too.
ENV SERVER_HOST=0.0.0.0 SERVER_PORT=8080 SERVER_HEALTH_PORT=8080 DATA_DIR=/var/lib/reconvene LOG_FORMAT=json
EXPOSE 8080
STOPSIGNAL SIGTERM
# bash speaks HTTP well enough for this; the image needs no curl.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["bash", "-c", \
    "exec 3<>/dev/tcp/127.0.0.1/$SERVER_HEALTH_PORT && printf 'GET /healthz HTTP/1.0\\r\\nHost: localhost\\r\\n\\r\\n' >&3 && head -n 1 <&3 | grep -q ' 200 '"]
ENTRYPOINT ["reconvene"]
CMD ["serve"]
