{{- define "carrel.name" -}}
{{- if contains "carrel" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-carrel{{ end -}}
{{- end -}}

{{- define "carrel.selector" -}}
app.kubernetes.io/name: carrel
app.kubernetes.io/component: server
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "carrel.labels" -}}
{{ include "carrel.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "carrel.claim" -}}
{{ .Values.workspaces.existingClaim | default (printf "%s-workspaces" (include "carrel.name" .)) }}
{{- end -}}
