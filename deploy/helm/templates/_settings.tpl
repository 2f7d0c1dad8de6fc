{{/* Settings of all pods. They are no ConfigMap: the migration runs before one would be made or changed. */}}
{{- define "permille.settings" -}}
# A folder below the volume's root: the API removes other users' access to it, and the root belongs to user root.
PERMILLE_DATA_DIR: /var/lib/permille/data
PERMILLE_WORKER_ROLE: {{ .Values.worker.role | quote }}
{{- with .Values.bucket }}
{{- if .url }}
PERMILLE_BLOB_BUCKET: {{ .url | quote }}
PERMILLE_BLOB_ROOT: {{ printf "%s/blobs" .root | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Environment variables of a component: those of this chart, then `env` of all pods and of the component. */}}
{{- define "permille.env" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $all := printf "%s\n%s" (include "permille.settings" $root) (include (printf "permille.%s.settings" $component) $root) | fromYaml -}}
{{- $own := keys $all -}}
{{- range list $root.Values.env (index $root.Values $component | default dict).env -}}
{{- range $name, $value := . -}}
{{- /* Otherwise `env` could give workers the owner's database, for example. */ -}}
{{- if has $name $own }}{{ fail (printf "The chart sets %s itself. Remove it from `env`, and see values.yaml for the value that changes it." $name) }}{{ end -}}
{{- $_ := set $all $name $value -}}
{{- end -}}
{{- end -}}
{{- $variables := list -}}
{{- range $name, $value := $all -}}
{{- $variables = append $variables (dict "name" $name (kindIs "string" $value | ternary "value" "valueFrom") $value) -}}
{{- end -}}
{{- toYaml $variables -}}
{{- end -}}
