# One image for the API and the workers; the device agent is installed from the wheel on the device itself.
#   docker build -t permille .
#   docker build --build-arg TORCH_INDEX=<address of PyTorch's wheels for your accelerator> -t permille .
# The service binds an address other than loopback only with TLS, so mount a certificate and its key:
#   docker run -p 8321:8321 -v permille:/var/lib/permille -v ./tls:/run/tls:ro permille \
#     up --data-dir /var/lib/permille --host 0.0.0.0 --allow-host models.example.org \
#     --tls-certificate /run/tls/cert.pem --tls-key /run/tls/key.pem
FROM python:3.12-slim AS build
WORKDIR /src
# The native kernels are compiled here; the second image needs no compiler.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY permille permille
COPY service service
COPY workers workers
COPY edge_agent edge_agent
COPY lab/permille_lab lab/permille_lab
ARG TORCH_INDEX=
RUN python -m venv /opt/permille \
 && /opt/permille/bin/pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
 && /opt/permille/bin/pip install --no-cache-dir -c constraints.txt '.[service,workers,celery,postgres]'

FROM python:3.12-slim
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/permille permille
COPY --from=build /opt/permille /opt/permille
ENV PATH=/opt/permille/bin:$PATH PYTHONUNBUFFERED=1
USER permille
WORKDIR /var/lib/permille
VOLUME /var/lib/permille
EXPOSE 8321
ENTRYPOINT ["permille"]
CMD ["up", "--data-dir", "/var/lib/permille", "--host", "0.0.0.0", "--tls-certificate", "/run/tls/cert.pem", "--tls-key", "/run/tls/key.pem"]
