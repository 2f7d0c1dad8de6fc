{{/* The prefix of all names: the release, and the chart unless the release names it. A service has no dot. */}}
{{- define "permille.name" -}}
{{- $name := contains .Chart.Name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) -}}
{{- $name | replace "." "-" | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels of a component. Arguments: the root and the component. */}}
{{- define "permille.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ $root.Chart.Name }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "permille.labels" -}}
{{- $root := index . 0 -}}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
{{ include "permille.selector" . }}
{{- end -}}

{{/* The image of a component. Arguments: the root and the component. */}}
{{- define "permille.image" -}}
{{- $root := index . 0 -}}
{{- $images := $root.Values.images -}}
{{- $registry := required "Set images.registry to the registry that has permille-api and permille-worker, such as registry.example.org/permille." $images.registry -}}
{{- $digest := index $images.digests (index . 1) -}}
{{- $tag := $images.tag | default (printf "v%s" $root.Chart.AppVersion) -}}
image: {{ printf "%s/permille-%s" $registry (index . 1) }}{{ empty $digest | ternary (printf ":%s" $tag) (printf "@%s" $digest) }}
imagePullPolicy: {{ $images.pullPolicy }}
{{- end -}}

{{/* Fields of all pods that are not a matter of one component. */}}
{{- define "permille.pod" -}}
serviceAccountName: {{ quote .Values.serviceAccount }}
automountServiceAccountToken: false
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ quote . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The name of a claim. Arguments: the root, and `data` or `private`. */}}
{{- define "permille.claim" -}}
{{- $root := index . 0 -}}
{{- (index $root.Values.storage (index . 1)).claim | default (printf "%s-%s" (include "permille.name" $root) (index . 1)) -}}
{{- end -}}
