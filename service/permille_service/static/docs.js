// Starts the vendored Swagger UI on this server's own OpenAPI document. Nothing is fetched from elsewhere.
window.addEventListener("load", () => {
  window.ui = SwaggerUIBundle({
    url: "/openapi.json",
    dom_id: "#docs",
    deepLinking: true,
    displayRequestDuration: true,
    docExpansion: "list",
    filter: true,
    persistAuthorization: false,
    tryItOutEnabled: true,
    validatorUrl: null,
    syntaxHighlight: { activated: true },
  });
});
