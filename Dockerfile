# Three images: the API and the agent, without torch, and the worker.
#   docker build --target api -t permille-api .
#   docker build --target agent -t permille-agent .
#   docker build --target worker --build-arg TORCH_INDEX=<address of PyTorch's CPU wheels> -t permille-worker .
# Without TORCH_INDEX the worker gets the default build of torch with the libraries of CUDA.
# To pin the base image by its digest: --build-arg BASE=python:3.11-slim@sha256:...
# The service binds an address other than loopback only with TLS, so mount a certificate and its key:
#   docker run -p 8321:8321 -v permille:/var/lib/permille -v ./tls:/run/tls:ro permille-api \
#     up --no-worker --data-dir /var/lib/permille --host 0.0.0.0 --allow-host models.example.org \
#     --tls-certificate /run/tls/cert.pem --tls-key /run/tls/key.pem
#   docker run -v permille:/var/lib/permille permille-worker
#   docker run -v device:/var/lib/permille -v ~/notes:/notes:ro permille-agent train /notes
ARG BASE=python:3.11-slim
FROM ${BASE} AS wheel
WORKDIR /src
# The native kernels are compiled here; the images need no compiler.
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY requirements requirements
RUN pip install --no-cache-dir --no-deps --require-hashes --only-binary :all: -r requirements/build.txt
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY permille permille
COPY service service
COPY workers workers
COPY edge_agent edge_agent
COPY extensions extensions
COPY personal personal
COPY lab/permille_lab lab/permille_lab
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheel .

FROM wheel AS api-environment
RUN python -m venv /opt/permille \
 && /opt/permille/bin/pip install --no-cache-dir --no-deps --require-hashes --only-binary :all: -r requirements/api.txt \
 && /opt/permille/bin/pip install --no-cache-dir --no-deps --no-index /wheel/*.whl

FROM wheel AS agent-environment
RUN python -m venv /opt/permille \
 && /opt/permille/bin/pip install --no-cache-dir --no-deps --require-hashes --only-binary :all: -r requirements/agent.txt \
 && /opt/permille/bin/pip install --no-cache-dir --no-deps --no-index /wheel/*.whl

FROM wheel AS worker-environment
ARG TORCH_INDEX=
RUN python -m venv /opt/permille \
 && /opt/permille/bin/pip install --no-cache-dir --no-deps --require-hashes --only-binary :all: -r requirements/worker.txt \
      ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} $([ -n "$TORCH_INDEX" ] || echo -r requirements/cuda.txt) \
 && /opt/permille/bin/pip install --no-cache-dir --no-deps --no-index /wheel/*.whl

FROM ${BASE} AS base
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/permille permille \
 && install -d -m 700 -o permille -g permille /var/lib/permille-private
ENV PATH=/opt/permille/bin:$PATH PYTHONUNBUFFERED=1 PERMILLE_DATA_DIR=/var/lib/permille
USER permille
WORKDIR /var/lib/permille
VOLUME /var/lib/permille

FROM base AS worker
COPY --from=worker-environment /opt/permille /opt/permille
ENTRYPOINT ["python", "-P", "-m", "permille_workers"]

FROM base AS agent
COPY --from=agent-environment /opt/permille /opt/permille
ENV PERMILLE_AGENT_HOME=/var/lib/permille
ENTRYPOINT ["permille-agent"]

FROM base AS api
COPY --from=api-environment /opt/permille /opt/permille
EXPOSE 8321
ENTRYPOINT ["permille"]
CMD ["up", "--no-worker", "--data-dir", "/var/lib/permille", "--host", "0.0.0.0", "--tls-certificate", "/run/tls/cert.pem", "--tls-key", "/run/tls/key.pem"]
